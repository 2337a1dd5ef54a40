"""The launcher: starts ranks, obeys `membership` on them, collects the result. Loads no torch.

`launch` first: it prepares a launch, and `launcher` runs it. `rank_processes` starts and ends
processes (`rank_process`), `result` makes the Result. `background` is the training process that
outlives an Airflow task.
"""
