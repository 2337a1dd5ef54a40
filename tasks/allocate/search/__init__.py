"""Exact search for the best data-parallel configuration: branch and bound.

Read `branch_and_bound` first: it divides a `subproblem` (`branching`) after `lower_bounds` and
`tightening`; `cover`, `packing` and `collective_bound` give the bounds, with `time_tables`.
"""
