"""Leases on devices and runs, and the queue of runs that wait for devices.

Read `ledger` first: leases, and the heartbeat that renews them. `queue` and `queue_order` decide
which run is next; `launch_right` is the right to train a run; `pool_status` lists the holders of
devices. `tables`, `database` and `engine` contain the SQL.
"""
