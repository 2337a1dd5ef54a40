"""Tables, plots and progress for a person at a terminal.

`console` has what all screens share; `plan_screen`, `layer_table`, `run_view` and `train_view` are
the screens.
"""
