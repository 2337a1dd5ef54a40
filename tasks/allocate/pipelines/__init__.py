"""Pipelines over unlike devices: which stage computes which units of a model on which device.

`partition` divides a chain of units among devices, by the bounds of `suffix_table` and the steps of
`pass_times`. Arithmetic on values.
"""
