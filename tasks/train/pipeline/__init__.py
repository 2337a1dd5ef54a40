"""How a rank trains a stage of a pipeline: some consecutive units of the model.

Start with `stage_work`: what the rank holds. `stage_model` runs units, `prepared_call` makes one of
their calls; `stage_step` runs the passes in the schedule's order, `stage_passes` gives it the
rank's samples. `stage_holders` says which rank holds what, `stage_gradients` sums gradients among
pipelines; `deferred_weights` makes those of weights later.
"""
