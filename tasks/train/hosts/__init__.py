"""Ranks on other hosts: connections, the agent there, staging of data."""
