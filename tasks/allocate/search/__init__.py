"""Exact search for the best configuration."""
