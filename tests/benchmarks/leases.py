"""Processes fight for devices while some are killed (-9) and stopped (SIGSTOP) at random: are the leases safe, live and fair?

    python tests/benchmarks/leases.py [--processes 50] [--devices 8] [--seconds 60] [--url sqlite|postgresql|URL]

Each process, again and again, waits in the queue for one to three devices, works on them (each piece of work asks the ledger, by
token, and then writes to the device), and releases them. A device is a file that refuses a token lower than its newest, as a
fenced store does. What is counted:

- unsafe: the ledger said yes to an old token although a newer one had worked on the device before it was asked. Must be 0.
- late writes refused: asked in time, stopped, woke after expiry; the fence refused it. These do no harm.
- lost: devices that nobody can take once every lease has expired. Must be 0.
- starved: processes alive and awake for at least half of the time that never got a turn. Must be 0.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright.tasks.allocate.ledger import Holder, Ledger
from trainwright.tasks.allocate.queue import Queue
from trainwright.tasks.errors import RunHeld, ServiceUnreachable

FORK = multiprocessing.get_context("fork")  # so that a birth costs milliseconds
TTL_S, PLACE_TTL_S, AGE_S, LOOK_EVERY_S = 2.0, 1.5, 2.0, 0.1


@dataclass
class Fought:
    """What a fight came to."""

    turns: int
    work: int
    unsafe: int
    refused: int
    killed: int
    stopped: int
    lost: int
    starved: int
    longest_wait_s: float
    median_wait_s: float
    least_turns: int
    errors: int


def work_on(device: Path, token: int) -> tuple[bool, float]:
    """Write to a device with a token: whether it took it, and since when the newest token has worked on it (0: never)."""
    with device.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        newest, since = json.loads(file.read() or "[0, 0]")
        if token < newest:
            return False, since
        if token > newest:
            file.seek(0)
            file.truncate()
            file.write(json.dumps([token, time.monotonic()]))
        return True, since


def fighter(url: str, folder: Path, name: str, seed: int, until: float) -> None:
    """One process: its turns and its work, a line each."""
    random.seed(seed)
    ledger, run = Ledger(url), f"{name}-{seed}"
    queue, me = Queue(ledger, AGE_S), Holder(run)  # without a pid: only expiry ends what a killed one held
    devices = sorted(path.name for path in (folder / "devices").iterdir())
    with (folder / "logs" / run).open("a", buffering=1) as log:

        def note(kind: str, **fields: object) -> None:
            log.write(json.dumps({"kind": kind, "at": time.monotonic(), **fields}) + "\n")

        note("born")
        while time.monotonic() < until:
            try:
                _turn(ledger, queue, run, me, random.sample(devices, random.randint(1, 3)), folder, until, note)
            except ServiceUnreachable as error:
                note("error", text=str(error))


def _turn(ledger, queue, run, me, wanted, folder, until, note) -> None:  # type: ignore[no-untyped-def]
    token, since, priority = None, time.monotonic(), random.randint(0, 2)
    while token is None and time.monotonic() < until:
        turn = queue.look(run, me, wanted, len(wanted), ttl_s=PLACE_TTL_S, priority=priority)
        if turn.available.issuperset(wanted):
            token = queue.take(run, me, wanted, ttl_s=TTL_S, priority=priority)
        if token is None:
            time.sleep(LOOK_EVERY_S * min(1 + turn.rivals, 8) * random.uniform(0.5, 1.5))
    if token is None:
        queue.leave(run)
        return
    note("turn", waited=time.monotonic() - since)
    for _ in range(random.randint(1, 4)):
        asked_at = time.monotonic()
        if not ledger.renew(run, wanted, TTL_S, holder=me.name, token=token) or ledger.revoked_by(run):
            break
        for name in wanted:
            taken, newer_since = work_on(folder / "devices" / name, token)
            note("work", taken=taken, unsafe=not taken and newer_since < asked_at)
        time.sleep(random.uniform(0, 0.05))
    ledger.release(run, wanted, holder=me.name, token=token)


def fight(url: str, processes: int, devices: int, seconds: float, seed: int = 0) -> Fought:
    """Let them fight, and count."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="trainwright-leases-") as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        (folder / "devices").mkdir()
        for number in range(devices):
            (folder / "devices" / f"device {number}").touch()
        Ledger(url).held()  # makes the tables
        running: dict[int, tuple[Any, int]] = {}
        born: dict[int, float] = {}
        died: dict[int, float] = {}
        slept: dict[int, float] = {}
        started, number = time.monotonic(), 0
        until = started + seconds

        def start(slot: int) -> None:
            nonlocal number
            number += 1
            process = FORK.Process(target=fighter, args=(url, folder, str(slot), number, until))
            process.start()
            running[slot], born[number] = (process, number), time.monotonic()

        for slot in range(processes):
            start(slot)
        killed, stopped = 0, 0
        asleep: dict[int, float] = {}
        try:
            while time.monotonic() < until:
                time.sleep(chance.uniform(0.05, 0.3) * 50 / processes)
                for slot in [slot for slot, wakes in asleep.items() if wakes < time.monotonic()]:
                    os.kill(running[slot][0].pid, signal.SIGCONT)
                    del asleep[slot]
                slot = chance.randrange(processes)
                process, its_number = running[slot]
                if slot in asleep:
                    continue
                if chance.random() < 0.3:
                    process.kill()
                    process.join()
                    died[its_number] = time.monotonic()
                    killed += 1
                    start(slot)
                else:  # sometimes past the expiry of what it holds
                    os.kill(process.pid, signal.SIGSTOP)
                    sleep_s = chance.uniform(0.1, 2 * TTL_S)
                    asleep[slot] = time.monotonic() + sleep_s
                    slept[its_number] = slept.get(its_number, 0.0) + sleep_s
                    stopped += 1
        finally:
            ended = time.monotonic()
            for process, _ in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
            for process, _ in running.values():
                process.join(timeout=max(0.1, ended + 30 - time.monotonic()))
                process.kill()
                process.join()
        time.sleep(TTL_S + 0.5)
        lost, ledger = 0, Ledger(url)
        for number in range(devices):
            try:
                ledger.take([f"device {number}"], Holder("after"), "after")
            except RunHeld:
                lost += 1
        lived = {f"{number}": died.get(number, ended) - at - slept.get(number, 0.0) for number, at in born.items()}
        return _count(folder / "logs", killed, stopped, lost, {k for k, v in lived.items() if v > seconds / 2})


def _count(logs: Path, killed: int, stopped: int, lost: int, old: set[str]) -> Fought:
    waits, work, unsafe, refused, starved, errors, turns = [], 0, 0, 0, 0, 0, []
    for log in logs.iterdir():
        lines = []
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut short by kill -9
                lines.append(json.loads(line))
        own = [line for line in lines if line["kind"] == "turn"]
        done = [line for line in lines if line["kind"] == "work"]
        waits += [line["waited"] for line in own]
        work += sum(line["taken"] for line in done)
        unsafe += sum(line["unsafe"] for line in done)
        refused += sum(not line["taken"] and not line["unsafe"] for line in done)
        errors += sum(line["kind"] == "error" for line in lines)
        if log.name.rpartition("-")[2] in old:
            turns.append(len(own))
    starved = sum(count == 0 for count in turns)
    return Fought(
        sum(1 for _ in waits), work, unsafe, refused, killed, stopped, lost, starved, max(waits, default=0.0),
        statistics.median(waits) if waits else 0.0, min(turns, default=0), errors,
    )  # fmt: skip


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """A PostgreSQL of Debian's package, with a cluster of its own in a temporary folder; its URL."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        raise FileNotFoundError("PostgreSQL is not installed (make setup-system installs it)")
    as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="trainwright-pg-", ignore_cleanup_errors=True) as name:
        if as_user:
            subprocess.run(["chown", "postgres:postgres", name], check=True)
        data, quiet = f"{name}/data", {"check": True, "capture_output": True, "cwd": "/"}
        control = [*as_user, str(programs[-1] / "pg_ctl"), "-D", data, "-w"]
        subprocess.run([*control, "initdb", "-o", "-A trust -U trainwright"], **quiet)  # type: ignore[call-overload]
        options = f"-c listen_addresses='' -c unix_socket_directories={name} -c max_connections=200 -c fsync=off"
        subprocess.run([*control, "start", "-l", f"{name}/log", "-o", options], **quiet)  # type: ignore[call-overload]
        try:
            yield f"postgresql+psycopg://trainwright@/postgres?host={name}"
        finally:
            subprocess.run([*control, "stop", "-m", "immediate"], **quiet)  # type: ignore[call-overload]


def main() -> None:
    """Fight, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=50)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--url", default="sqlite", help="sqlite, postgresql, or the URL of a database")
    parser.add_argument("--json", action="store_true", help="one JSON document instead")
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
    print(f"{given.processes} processes, {given.devices} devices, {given.seconds:g} s, {given.url.split(':')[0]}")
    for name, value in asdict(found).items():
        print(f"  {name:<15} {value:.3g}" if isinstance(value, float) else f"  {name:<15} {value}")


if __name__ == "__main__":
    main()
