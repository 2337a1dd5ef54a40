"""Predicts memory: arithmetic on sizes. Loads no torch."""
