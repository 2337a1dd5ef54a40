"""Slurm as its commands show it. `slurm_commands` runs them; `slurm_answers` reads what they say.

`job_options` says what a host asks for, `expected_start` when it would get it, `nodes` what there
is; `slurm_job` runs a job that ends with its process. The engine that takes hosts from Slurm is in
`tasks.train.hosts.slurm`.
"""
