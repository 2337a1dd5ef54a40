"""Passes through a model that give the same however a step is divided, or when made again.

`keyed_dropout`: masks that depend on samples, not on ranks. `recomputed`: passes that are made
again in the backward pass, to save memory.
"""
