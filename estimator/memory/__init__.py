"""Predicts memory: arithmetic on sizes. Loads no torch.

`step_memory` first: a step's expected and safe memory. `workspace` is what operations need beside
their tensors; `heap`, `heap_simulation` and `freed_memory` are what malloc keeps.
"""
