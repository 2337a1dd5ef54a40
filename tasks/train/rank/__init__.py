"""A rank's work within a step: model, optimizer, passes.

Start with `rank`: one step, made of `rank_passes`. `replica` is the rank's copy of the model, or
its part; `held_state` is what others get of it. `optimizer`, `loss_scale` and `divergence` complete
a step; `rank_validation` follows an epoch.
"""
