"""Ranks on other hosts: connections, the agent there, staging of data.

Read `hosts` first. `session` is the connection to a host, and closes a silent one; `host_stream`
is the process that carries it, and waits for the host; `reconnect` opens it again; `container` has
it run in a container there. `host_addresses` finds how hosts reach this machine, `host_order` is an
order as it applies on a host. `agent` runs on the host; `remote_rank` represents one of its ranks
here. `data_staging` and `stage_data` stage the data. `versions` checks that both ends run the same
code. `checkpoint/checkpoint_transfer` brings rows and checkpoints back.
"""
