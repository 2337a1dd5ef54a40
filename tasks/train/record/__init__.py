"""What a training records: metrics, events, timings, TensorBoard.

`metrics` writes parquet files, from rows that `journal` keeps until the store has them; `live`
reads both. `events`, `timings` and `tensorboard` are the other records.
"""
