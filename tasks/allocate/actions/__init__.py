"""What each rank is predicted to do in a step of a layout: lists of actions, and their times.

`actions` turns a layout into a list for each rank, `step_simulator` predicts their time and bytes.
Tests prove with `action_check` that such lists end if they are executed. Ranks do not execute them
(`actions`). Arithmetic on values.
"""
