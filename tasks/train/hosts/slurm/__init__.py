"""Hosts that Slurm's queue gives. The engine is `slurm_engine`."""
