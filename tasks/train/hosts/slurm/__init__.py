"""Hosts that Slurm's queue gives: the engine, its jobs, and what Slurm's commands say."""
