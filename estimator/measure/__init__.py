"""Measures devices. Loads torch.

`measure_device` first: it spends the budget of a calibration. `network_timing` times the networks,
`torch_device` runs them, `sentinel` follows the machine's speed, `energy_meter` and `power` its
power; `all_reduce` times the link between ranks.
"""
