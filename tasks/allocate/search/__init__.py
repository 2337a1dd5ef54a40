"""Exact search for the best data-parallel configuration: branch and bound.

`branch_and_bound` first: it divides a `subproblem` by `branching`, after `lower_bounds` and
`tightening`; `cover`, `packing` and `collective_bound` make the bounds, from `time_tables`.
"""
