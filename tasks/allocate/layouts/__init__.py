"""Layouts of parallelism: which are permitted, what each rank does in a step, how long it takes.

`actions` turns a layout into each rank's list of actions, `action_check` proves that such lists can
be executed, `step_simulator` predicts their time, memory and bytes. `planning` gives a plan its
layout. Arithmetic on values.
"""
