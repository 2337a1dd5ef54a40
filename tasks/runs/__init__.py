"""A run's folder: its artefacts, its state, and the listing of runs."""
