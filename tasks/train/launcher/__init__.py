"""The launcher: starts ranks, obeys `membership` on them, collects the result. Loads no torch."""
