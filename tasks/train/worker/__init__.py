"""A rank's process: its start, its loop over steps, the learning-rate ramp."""
