"""Drift: compares the profile of a run's data with that of an earlier run.

Read `compare_profiles` first. `profile` makes a profile in one pass over record batches,
`random_halves` adds its noise, `effect_sizes` has the statistics, `reference_profile` finds the
earlier run.
"""
