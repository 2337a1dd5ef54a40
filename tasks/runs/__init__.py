"""Runs: the folder of a run, its artefacts, model and state, and the listing of a store's runs."""
