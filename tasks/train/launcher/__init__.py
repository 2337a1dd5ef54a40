"""The launcher: starts ranks, watches them, restarts the lost ones, collects the result. Loads no torch."""
