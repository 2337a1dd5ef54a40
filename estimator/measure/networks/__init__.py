"""The networks that calibration measures. Loads torch."""
