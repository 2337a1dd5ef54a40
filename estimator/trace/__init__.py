"""Reads a model's structure from its code. Loads torch.

`trace` first: it makes a model's Structure. `source` loads the model, `training_step` makes its
step, `recorder` records its operations, `operations` describes them, `two_sizes` converts them to
lines over the batch size.
"""
