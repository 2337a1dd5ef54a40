"""Layouts of parallelism: which are permitted, what each rank does in a step, how long it takes.

`actions` turns a layout into each rank's list of actions, `check` proves that such lists can be
executed, `simulate` predicts their time, memory and bytes. Arithmetic on values.
"""
