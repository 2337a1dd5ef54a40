"""The global batch: samples, splits, rebalancing, growth.

`sampling` says which samples a rank takes, `batch_split` how many each takes, `rebalance` when that
changes. `adaptive_batch` says how the global batch grows; `noise_scale` and `half_batches` measure
how far that pays.
"""
