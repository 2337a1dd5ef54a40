"""A rank's work within a step: model, optimizer, gradients.

Start with `rank`: one step. `replica` is the rank's copy of the model. `gradients` sums gradients
of unequal batches, and `batch_norm` its statistics. `optimizer`, `loss_scale` and `divergence`
complete a step.
"""
