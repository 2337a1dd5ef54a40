"""Processes compete for devices while some are killed (-9) or stopped (SIGSTOP) at random.

    python tests/benchmarks/leases.py [--processes 50] [--devices 8] [--seconds 60]
                                      [--url sqlite|postgresql|URL] [--json]

Tests whether leases are safe, live and fair. Each process repeatedly waits in the queue for one to
three devices, works on them, and releases them. Its work is to renew the lease, by token, and then
to write a checkpoint into the device's folder through the fence of training. Sometimes a holder
stops itself in the middle of that write, and continues after another process has worked on its
device. Counts from the processes' logs:

- unsafe: the ledger confirmed a token although a newer one had worked on the device before. Must
  be 0.
- late: writes during which a holder woke after a newer one had worked. refused: those that the
  fence refused. harmful: those that the fence let through and that count as checkpoints; must be
  0. mixed: final checkpoints that contain another token's bytes; must be 0.
- lost: devices that no process can take after every lease has expired. Must be 0.
- starved: waits longer than STARVED times the fair one. The fair wait is processes * seconds /
  turns: the wait of each if they took turns. A wait counts while the process is alive and awake,
  from its arrival in the queue; a process stopped so long that its place expired arrives again.
  Must be 0 on a machine with time for many turns each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from lease_fight import counted, fighter
from lease_fight.temporary_postgresql import postgresql

from trainwright.tasks.errors import RunHeld
from trainwright.tasks.leases.ledger import Holder, Ledger

FORK = multiprocessing.get_context("fork")  # starts a process in milliseconds
KILLED = 0.3
"""Share of the disturbances that kill a process; the others stop it for a while"""
STARVED = 3.0
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # faster than a disk


@dataclass
class Fought:
    """The outcome of a competition."""

    turns: int
    work: int
    unsafe: int
    late: int
    refused: int
    harmful: int
    mixed: int
    killed: int
    stopped: int
    lost: int
    starved: int
    fair_wait_s: float
    longest_wait_s: float
    median_wait_s: float
    errors: int


class Crowd:
    """The competing processes: one per slot, replaced when it is killed."""

    def __init__(self, url: str, folder: Path, processes: int, until: float) -> None:
        self._url, self._folder, self._until, self._started = url, folder, until, 0
        self._running: dict[int, tuple[BaseProcess, str]] = {}
        self._asleep: dict[int, tuple[float, float]] = {}
        self.killed = self.stopped = 0
        self.died: dict[str, float] = {}
        """When each killed process died."""
        self.sleeps: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """When each process was stopped, and continued."""
        for slot in range(processes):
            self._start(slot)

    def _start(self, slot: int) -> None:
        self._started += 1
        arguments = (self._url, self._folder, str(slot), self._started, self._until)
        process = FORK.Process(target=fighter.fight, args=arguments)
        process.start()
        self._running[slot] = process, f"{slot}-{self._started}"

    def disturb(self, chance: random.Random) -> None:
        """Continue the processes that have slept enough; kill or stop another."""
        now = time.monotonic()
        for slot in [slot for slot, (_, wakes) in self._asleep.items() if wakes < now]:
            self._signal(slot, signal.SIGCONT)
            name = self._running[slot][1]
            self.sleeps[name].append((self._asleep.pop(slot)[0], time.monotonic()))
        slot = chance.randrange(len(self._running))
        process, name = self._running[slot]
        if slot in self._asleep:
            return
        if chance.random() < KILLED:
            process.kill()
            process.join()
            self.died[name] = time.monotonic()
            (self._folder / "dozing" / name).unlink(missing_ok=True)
            self.killed += 1
            self._start(slot)
        else:  # sometimes until after its leases expire
            self._signal(slot, signal.SIGSTOP)
            now = time.monotonic()
            self._asleep[slot] = now, now + chance.uniform(0.1, 2 * fighter.TTL_S)
            self.stopped += 1

    def end(self) -> float:
        """Wait for all processes to end, and kill those that do not; when the fight ended."""
        ended = time.monotonic()
        for slot, (since, _) in self._asleep.items():
            self.sleeps[self._running[slot][1]].append((since, ended))
        for slot in self._running:
            with contextlib.suppress(ProcessLookupError):
                self._signal(slot, signal.SIGCONT)
        for process, _ in self._running.values():
            process.join(timeout=max(0.1, ended + 30 - time.monotonic()))
            process.kill()
            process.join()
        return ended

    def _signal(self, slot: int, what: signal.Signals) -> None:
        pid = self._running[slot][0].pid
        assert pid is not None
        os.kill(pid, what)


def fight(url: str, processes: int, devices: int, seconds: float, seed: int = 0) -> Fought:
    """Run the competition, and count."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="trainwright-leases-", dir=MEMORY) as name:
        folder = Path(name)
        for part in ("logs", "dozing", *(f"devices/device {number}" for number in range(devices))):
            (folder / part).mkdir(parents=True)
        Ledger(url).held()  # creates the tables
        until = time.monotonic() + seconds
        crowd = Crowd(url, folder, processes, until)
        try:
            while time.monotonic() < until:
                time.sleep(chance.uniform(0.05, 0.3) * 50 / processes)
                fighter.wake(folder)
                crowd.disturb(chance)
        finally:
            ended = crowd.end()
        time.sleep(fighter.TTL_S + 0.5)
        lost = _lost(url, devices)
        logs = {log.name: counted.lines(log) for log in (folder / "logs").iterdir()}
        waits = [
            wait
            for name, log in logs.items()
            for wait in counted.awake_waits(log, crowd.sleeps[name], crowd.died.get(name, ended))
        ]
        every = logs.values()
        turns = counted.number(every, "turn")
        fair_s = processes * seconds / max(1, turns)
        late, refused, harmful = counted.late(every)
        return Fought(
            turns=turns,
            work=counted.number(every, "work"),
            unsafe=counted.unsafe(every),
            late=late,
            refused=refused,
            harmful=harmful,
            mixed=counted.mixed(folder),
            killed=crowd.killed,
            stopped=crowd.stopped,
            lost=lost,
            starved=sum(wait > STARVED * fair_s for wait in waits),
            fair_wait_s=fair_s,
            longest_wait_s=max(waits, default=0.0),
            median_wait_s=statistics.median(waits) if waits else 0.0,
            errors=counted.number(every, "error"),
        )


def _lost(url: str, devices: int) -> int:
    """The number of devices that can't be taken."""
    ledger, lost = Ledger(url), 0
    for number in range(devices):
        try:
            ledger.take([f"device {number}"], Holder("after"), "after")
        except RunHeld:
            lost += 1
    return lost


def main() -> None:
    """Run the competition, and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=50)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--url", default="sqlite", help="sqlite, postgresql, or the URL of a database"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if given.url == "postgresql":
            url = stack.enter_context(postgresql())
        elif given.url == "sqlite":
            url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/ledger.sqlite"
        else:
            url = given.url
        found = fight(url, given.processes, given.devices, given.seconds)
    if given.json:
        print(json.dumps(asdict(found)))
        return
    backend = given.url.split(":")[0]
    print(f"{given.processes} processes, {given.devices} devices, {given.seconds:g} s, {backend}")
    for name, value in asdict(found).items():
        print(f"  {name:<15} {value:.3g}" if isinstance(value, float) else f"  {name:<15} {value}")


if __name__ == "__main__":
    main()
