"""Predicts time, energy and communication: arithmetic on values. Loads no torch.

`step_time` first. It adds `op_cost` over a step's operations (`step_work`), with the costs of a
`calibration`, a `reference` or a `datasheet`; then `loop_cost`, and the `correction` by finished
runs. `energy` and `communication` predict the rest.
"""
