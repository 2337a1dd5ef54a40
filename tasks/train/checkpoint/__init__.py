"""Checkpoints: their files, how they reach the store, which of them count."""
