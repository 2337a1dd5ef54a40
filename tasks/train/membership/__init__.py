"""Which ranks train together: a state machine and its parts. Pure: no clock, no I/O, no torch.

`state_machine` first: it takes an `event` and returns the `instruction`s that follow. `transitions`
change the `state`; `next_group` chooses the members, `watchdog` finds hung ranks, `restart_limits`
says how often a process may restart, `capacity` says how many devices and samples are needed.
"""
