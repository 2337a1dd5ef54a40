"""The launcher: starts ranks, follows `membership`, collects the result. Loads no torch.

Read `launch` first: it prepares a launch, and `launcher` runs it. `rank_processes` starts and ends
processes (`rank_process`), `result` makes the Result. `background` is the training process that
outlives an Airflow task.
"""
