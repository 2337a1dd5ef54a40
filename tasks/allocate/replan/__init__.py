"""Plans again: a run's plan when its pool has changed (`run_plans`), and the layout of a training
that runs, for the devices that are left and by measured speeds (`next_layout`).
"""
