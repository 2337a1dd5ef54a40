"""Predicts memory: arithmetic on sizes. Loads no torch.

`step_memory` first: a step's expected and safe memory. `workspace` predicts what operations need
beside their tensors; `heap` and `heap_simulation` model what malloc keeps; `freed_memory` controls
it. `recomputation` simulates a step in which modules are recomputed, `recompute_choice` chooses
them.
"""
