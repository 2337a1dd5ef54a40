"""What a rank does within a step: model, optimizer, gradients.

`rank` first: one step. `replica` is the rank's copy of the model; `gradients` sums over unequal
batches, and `batch_norm` its statistics; `optimizer`, `loss_scale` and `divergence` complete a
step.
"""
