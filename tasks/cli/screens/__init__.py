"""Tables, plots and progress for a person at a terminal.

`console` has what all screens share. `plans/` shows plans, `runs/` shows runs, and the modules
beside it show one thing each.
"""
