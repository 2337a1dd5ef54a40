"""Warnings about data, which never reject it.

Read `data_warnings` first. `leakage` finds columns that give the target away, `repeated_rows` rows
with the same inputs, `neighbours` doubtful labels.
"""
