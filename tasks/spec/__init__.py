"""What people write, and its parser: job file, pool file, daily windows, the trigger form.

`job` (with its parts `data_spec`, `train_spec`, `objective`), `pool`, `windows` and `form` are the
documents. `documents` parses them and words every refusal; `eligibility` says which devices a job
may use.
"""
