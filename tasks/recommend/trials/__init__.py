"""Short trainings without a run, in one process, on rows of the job's data.

`trial` trains a model, `probe` compares several; `boosted_trees` is the reference beside them.
"""
