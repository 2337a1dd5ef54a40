"""Predicts time, energy and communication: arithmetic on values. Loads no torch."""
