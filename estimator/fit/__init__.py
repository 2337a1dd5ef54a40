"""Fits the cost model to measurements. Loads no torch.

`cost_fit` first: it fits the cost of each operation, from a `roofline_fit`. `step_fit` fits whole
steps, `whole_steps` the difference of operations' costs within a step.
"""
