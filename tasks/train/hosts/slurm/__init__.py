"""Hosts that Slurm's queue gives. Read `slurm_engine` first.

`slurm_job` runs a job that ends with its process.
"""
