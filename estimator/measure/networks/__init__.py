"""The networks that calibration measures. Loads torch.

`benchmark` generates them from `image_networks`, `sequence_networks` and `single_layers`.
"""
