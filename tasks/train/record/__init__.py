"""What a training records: metrics, events, timings, TensorBoard."""
