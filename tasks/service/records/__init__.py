"""Answers about runs, TensorBoards, and the page."""
