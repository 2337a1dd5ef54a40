"""Runs: the folder of a run, its files, model and state, and the listing of a store's runs.

`run` first: the folder. `artefacts/` has a class for each of its files, `model` the model,
`run_state` the state, `listing` the list of runs.
"""
