"""Leases on devices and runs, and the queue of runs that wait for devices.

`ledger` first: leases, and the heartbeat that renews them. `queue` and `queue_order` decide whose
turn it is; `launch_right` is the right to train a run; `pool_status` shows who holds what.
`tables`, `database` and `engine` are the SQL.
"""
