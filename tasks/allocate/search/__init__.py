"""Exact search for the best data-parallel configuration: branch and bound."""
