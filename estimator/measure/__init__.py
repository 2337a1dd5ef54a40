"""Measures devices. Loads torch."""
