"""Counts the events in the logs of the benchmark `leases`."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lease_fight.fighter import PLACE_TTL_S, DeviceFolder

Log = list[dict[str, Any]]


def lines(log: Path) -> Log:
    """The events of a log."""
    found = []
    for line in log.read_text().splitlines():
        with contextlib.suppress(ValueError):  # cut short by kill -9
            found.append(json.loads(line))
    return found


def awake_waits(log: Log, sleeps: list[tuple[float, float]], ended: float) -> list[float]:
    """The duration of each wait of a process, until its turn or its end, without its sleeps.

    A sleep so long that its place in the queue expired starts the wait again.
    """
    waits: list[float] = []
    since: float | None = None
    for line in [*log, {"kind": "end", "at": ended}]:
        if since is not None and line["kind"] in ("turn", "waits", "end"):
            within = [(max(since, start), min(line["at"], end)) for start, end in sleeps]
            within = [(start, end) for start, end in within if end > start]
            begin = max((end for start, end in within if end - start > PLACE_TTL_S), default=since)
            slept = sum(end - start for start, end in within if start >= begin)
            waits.append(max(0.0, line["at"] - begin - slept))
            since = None
        if line["kind"] == "waits":
            since = line["at"]
    return waits


def unsafe(logs: Collection[Log]) -> int:
    """Work whose token the ledger confirmed after a newer token had worked on the device."""
    by_device: dict[str, Log] = defaultdict(list)
    for line in _of_kind(logs, "work"):
        by_device[line["device"]].append(line)
    return sum(
        any(newer["token"] > old["token"] and newer["at"] < old["asked_at"] for newer in work)
        for work in by_device.values()
        for old in work
    )


def late(logs: Collection[Log]) -> tuple[int, int, int]:
    """Holders that woke in the middle of a write after a newer one had worked on the device.

    Returns their number, how many the fence refused, and how many did harm.
    """
    work = _of_kind(logs, "work")
    found = refused = harmful = 0
    for log in logs:
        for woken, following in itertools.pairwise(log):
            if woken["kind"] == "wakes" and any(
                one["device"] == woken["device"]
                and one["at"] < woken["at"]
                and one["token"] > woken["token"]
                for one in work
            ):
                found += 1
                refused += following["kind"] == "refused"
                harmful += following.get("counts", False)
    return found, refused, harmful


def mixed(folder: Path) -> int:
    """Valid checkpoints with another token's bytes."""
    stores = [DeviceFolder(device) for device in (folder / "devices").iterdir()]
    return sum(
        store.get(f"checkpoints/step-{one.step:08d}/model") != str(one.token).encode()
        for store in stores
        for one in store.states()
    )


def number(logs: Collection[Log], kind: str) -> int:
    """Events of a kind."""
    return len(_of_kind(logs, kind))


def _of_kind(logs: Collection[Log], kind: str) -> Log:
    return [line for log in logs for line in log if line["kind"] == kind]
