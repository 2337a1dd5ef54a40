"""A plan for a person: in tables (`plan_screen`), in a sentence, and drawn (`plan_plot`)."""
