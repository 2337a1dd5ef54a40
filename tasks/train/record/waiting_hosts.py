"""Finds the hosts that a run waits for in a cluster's queue, in the run's events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def waiting_hosts(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last event about each host that has not come yet, in the order of these events.

    Such events are notices with `host` and `waits`. A launch (`ranks`) with other hosts than the
    earlier one does not wait for that one's.
    """
    found = dict[str, dict[str, Any]]()
    for event in events:
        if event["event"] == "ranks":
            used = {str(device).rpartition("/")[0] for device in event["devices"]}
            found = {host: one for host, one in found.items() if host in used}
        elif event["event"] == "notice" and "waits" in event:
            found.pop(event["host"], None)
            if event["waits"]:
                found[event["host"]] = event
    return list(found.values())
