"""The global batch: sampling, the split over ranks, rebalancing and growth.

`sampling` chooses each rank's samples, `batch_split` their number, and `rebalance` when that
changes. `adaptive_batch` grows the global batch; `noise_scale` and `half_batches` measure how far
that pays.
"""
