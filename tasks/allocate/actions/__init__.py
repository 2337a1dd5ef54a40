"""What each rank does in a step of a layout: lists of actions, and how long they take.

`actions` turns a layout into a list for each rank, `step_simulator` predicts their time and bytes.
Tests prove with `action_check` that ranks can execute such lists. Arithmetic on values.
"""
