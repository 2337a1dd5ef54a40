"""Answers about runs, TensorBoards, and the page.

`routes` has the routes, `run_records` the answers about runs; `tensorboards` starts
TensorBoards, `pages` serves the files under page/.
"""
