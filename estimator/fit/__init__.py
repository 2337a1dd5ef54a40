"""Fits the cost model to measurements. Loads no torch."""
