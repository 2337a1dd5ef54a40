"""Which ranks train together: a state machine and its parts. Pure: no clock, no I/O, no torch."""
