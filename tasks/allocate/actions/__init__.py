"""What each rank does in a step of a layout: lists of actions, and how long they take.

`actions` turns a layout into a list for each rank, `action_check` proves that ranks can execute
such lists, `step_simulator` predicts their time and bytes. Arithmetic on values.
"""
