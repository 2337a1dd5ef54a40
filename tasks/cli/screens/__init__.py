"""Tables, plots and progress for a person at a terminal."""
