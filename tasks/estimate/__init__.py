"""Step `estimate`: what a training step costs on each kind of device; calibration; corrections from finished runs."""
