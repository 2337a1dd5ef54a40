"""Values a plan is made of: configurations, their cost, their placement, and what is searched."""
