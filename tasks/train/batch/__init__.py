"""The global batch: samples, splits, rebalancing, growth."""
