"""What the service answers about runs, and the page."""
