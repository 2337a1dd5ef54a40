"""What people write, and its parser: job file, pool file, daily windows, the trigger form.

`job`, `pool`, `windows` and `form` are the documents. `documents` parses them and words every
refusal; `eligibility` says which devices a job may use.
"""
