"""A run for a person: while it goes on (`run_view`), and its summary (`run_screen`)."""
