"""The commands, one module for each or for a few of one kind: first `run_commands`.

`pool` and what it needs are in `tasks.cli`. A command reads options, calls a step or the library,
and prints; it imports what it needs when it runs, so that `--help` is fast.
"""
