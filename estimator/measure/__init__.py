"""Measures devices. Loads torch.

`measure_device` first: it runs a calibration within its budget. `network_timing` times the
networks, `torch_device` runs them, `sentinel` measures the machine's speed, `energy_meter` and
`power` its power; `all_reduce` times the link between ranks.
"""
