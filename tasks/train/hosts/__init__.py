"""Ranks on other hosts: connections, the agent there, staging of data.

`hosts` first. `session` is the connection to a host, and gives up a silent one; `reconnect` tries
it again. `agent` runs on the host, and `remote_rank` stands for one of its ranks. `data_staging`
and `stage_data` bring data there, `checkpoint_transfer` brings metrics and checkpoints back. `versions`
checks that both ends run the same code.
"""
