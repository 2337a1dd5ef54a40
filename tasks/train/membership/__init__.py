"""Which ranks train together: a state machine and its parts. Pure: no clock, no I/O, no torch.

Read `state_machine` first: it takes an `event` and returns `instruction`s. `transitions` change the
`state`; `next_group` chooses the members, `watchdog` finds hung ranks, `restart_limits` limits
restarts, `capacity` checks that enough devices with enough memory are left.
"""
