"""Records a training: metrics, events, timings, TensorBoard.

`metrics` writes parquet files from rows that `journal` keeps until they are uploaded; `live` reads
both. `events`, `timings` and `tensorboard` are the other records.
"""
