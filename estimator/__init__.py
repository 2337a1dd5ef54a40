"""What a model costs on a device: its structure, time, memory and energy.

`structure`, `curves` and `devices` are the values that all its rooms use.
"""
