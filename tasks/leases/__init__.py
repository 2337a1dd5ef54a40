"""Leases on devices and runs, and the queue of runs that wait for devices."""
