"""Reads a model's structure from its code. Loads torch."""
