"""Recomputation in plans: modules whose forward pass is done again, so that a step fits in memory.

`recomputing_curves` first: what a kind of device needs then. `stage_recompute`: what a stage of a
pipeline recomputes; `recompute_words`: a plan with it in words. `allocate.recompute_search` says
whether it pays for devices that hold whole models.
"""
