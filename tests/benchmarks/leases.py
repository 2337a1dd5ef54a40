"""Processes fight for devices while some are killed (-9) and stopped (SIGSTOP) at random: are the leases safe, live and fair?

    python tests/benchmarks/leases.py [--processes 50] [--devices 8] [--seconds 60] [--url sqlite|postgresql|URL]

Each process, again and again, waits in the queue for one to three devices, works on them, and releases them. A piece of work asks
the ledger, by token, and then writes a checkpoint into the device's folder, through the fence that training writes through.
Now and then a holder stops itself in the middle of that write, and is woken when another has worked on its device since. What is
counted, from what each process noted:

- unsafe: the ledger said yes to a token although a newer one had worked on the device before it was asked. Must be 0.
- late: writes that a holder woke up in the middle of, when a newer one had worked. refused: those of them that the fence refused.
  harmful: those that the fence let through and that count as checkpoints. Must be 0. mixed: checkpoints that count at the end
  and hold another token's bytes. Must be 0.
- lost: devices that nobody can take once every lease has expired. Must be 0.
- starved: waits longer than STARVED times the fair one. The fair one is processes * seconds / turns, which is how long each would
  wait if they took turns. A wait counts while the process lives and is awake, from when it came into the queue; one that was
  stopped for so long that its place expired comes anew. Must be 0 on a machine with time for many turns each.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainwright.tasks.errors import RunHeld, ServiceUnreachable
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.spec.job import CheckpointPolicy
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import Content, sha256
from trainwright.tasks.train.checkpoint import fence

FORK = multiprocessing.get_context("fork")  # so that a birth costs milliseconds
TTL_S, PLACE_TTL_S, AGE_S, LOOK_EVERY_S = 2.0, 1.5, 2.0, 0.1
DROWSY = 0.05  # of the turns
POLICY = CheckpointPolicy(keep_last=5)
STARVED = 3.0
MEMORY = (
    "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
)  # the devices are not to be as slow as a disk


@dataclass
class Fought:
    """What a fight came to."""

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


class DeviceFolder(FolderStore):
    """A device's checkpoints. `doze` is called, once, when all has been asked and the first object is about to be written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.doze: Any = None

    def create(self, key: str, data: Content, digest: str | None = None) -> bool:
        """Write, perhaps after a sleep."""
        self._sleep()
        return super().create(key, data, digest)

    def swap(
        self, key: str, data: Content, version: str | None, digest: str | None = None
    ) -> str | None:
        """The same."""
        self._sleep()
        return super().swap(key, data, version, digest)

    def _sleep(self) -> None:
        doze, self.doze = self.doze, None
        if doze is not None:
            doze()

    def states(self) -> list[Any]:
        """The checkpoints that count, by step."""
        found = []
        for entry in fence.read_index(self)[0].checkpoints:
            with contextlib.suppress(FileNotFoundError):  # dropped by its holder meanwhile
                found.append(
                    SimpleNamespace(
                        **json.loads(self.get(f"{fence.folder_name(entry.step)}/{fence.STATE}"))
                    )
                )
        return found


class Fighter:
    """One process: its turns and its work, a line each in its log."""

    def __init__(self, url: str, folder: Path, name: str, seed: int, until: float) -> None:
        random.seed(seed)
        self.run, self.folder, self.until = f"{name}-{seed}", folder, until
        self.ledger = Ledger(url)
        self.queue, self.me = (
            Queue(self.ledger, AGE_S),
            Holder(self.run),
        )  # no pid: only expiry ends what a killed one held
        self.devices = sorted(path.name for path in (folder / "devices").iterdir())
        self.log = (folder / "logs" / self.run).open("a", buffering=1)
        while time.monotonic() < until:
            try:
                self.turn(random.sample(self.devices, random.randint(1, 3)))
            except ServiceUnreachable as error:
                self.note("error", text=str(error))

    def note(self, kind: str, **fields: object) -> None:
        """Write a line."""
        self.log.write(json.dumps({"kind": kind, "at": time.monotonic(), **fields}) + "\n")

    def turn(self, wanted: list[str]) -> None:
        """Wait, work, release."""
        token, priority = None, random.randint(0, 2)
        self.note("waits")
        while token is None and time.monotonic() < self.until:
            turn = self.queue.look(
                self.run, self.me, wanted, len(wanted), ttl_s=PLACE_TTL_S, priority=priority
            )
            if turn.available.issuperset(wanted):
                token = self.queue.take(self.run, self.me, wanted, ttl_s=TTL_S, priority=priority)
            if token is None:
                time.sleep(LOOK_EVERY_S * min(1 + turn.rivals, 8) * random.uniform(0.5, 1.5))
        if token is None:
            self.queue.leave(self.run)
            return
        self.note("turn")
        stores = {name: DeviceFolder(self.folder / "devices" / name) for name in wanted}
        try:
            rights = {name: fence.claim(store, token) for name, store in stores.items()}
            if random.random() < DROWSY:
                name = random.choice(wanted)
                stores[name].doze = lambda: self.doze(name, token)
            for _ in range(random.randint(1, 4)):
                asked_at = time.monotonic()
                if not self.ledger.renew(self.run, wanted, TTL_S, holder=self.me.name, token=token):
                    break
                if self.ledger.revoked_by(self.run):
                    break
                for name, store in stores.items():
                    self.work(name, store, rights[name], token, asked_at)
                time.sleep(random.uniform(0, 0.05))
        except RunHeld:
            self.note("refused", token=token)
        self.ledger.release(self.run, wanted, holder=self.me.name, token=token)

    def work(
        self, name: str, store: DeviceFolder, right: fence.Fence, token: int, asked_at: float
    ) -> None:
        """Write a checkpoint; those that are old are dropped with it."""
        step = 1 + max((one.step for one in store.states()), default=0)
        where = fence.folder_name(step)
        state = json.dumps({"step": step, "token": token}).encode()
        right.put(f"{where}/model", str(token).encode())
        right.put(f"{where}/{fence.STATE}", state)
        right.commit(fence.Entry(step, sha256(state)), ["model"], POLICY)
        counts = any((one.token, one.step) == (token, step) for one in store.states())
        self.note("work", device=name, token=token, step=step, asked_at=asked_at, counts=counts)

    def doze(self, device: str, token: int) -> None:
        """Be stopped until another has worked on the device."""
        note = self.folder / "dozing" / self.run
        part = note.with_suffix(".part")
        part.write_text(json.dumps({"pid": os.getpid(), "device": device, "token": token}))
        part.rename(note)
        self.note("dozes", device=device, token=token)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.note("wakes", device=device, token=token)


def wake(folder: Path) -> None:
    """Wake those who doze, and whose device another has worked on since."""
    for note in (folder / "dozing").glob("*[0-9]"):
        dozing = json.loads(note.read_text())
        states = DeviceFolder(folder / "devices" / dozing["device"]).states()
        if any(one.token > dozing["token"] for one in states):
            with contextlib.suppress(ProcessLookupError):
                os.kill(dozing["pid"], signal.SIGCONT)
            note.unlink()


def fight(url: str, processes: int, devices: int, seconds: float, seed: int = 0) -> Fought:
    """Let them fight, and count."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="trainwright-leases-", dir=MEMORY) as name:
        folder = Path(name)
        for part in ("logs", "dozing", *(f"devices/device {number}" for number in range(devices))):
            (folder / part).mkdir(parents=True)
        Ledger(url).held()  # makes the tables
        running: dict[int, tuple[Any, str]] = {}
        died: dict[str, float] = {}
        sleeps: dict[str, list[tuple[float, float]]] = defaultdict(list)
        started, number = time.monotonic(), 0
        until = started + seconds

        def start(slot: int) -> None:
            nonlocal number
            number += 1
            process = FORK.Process(target=Fighter, args=(url, folder, str(slot), number, until))
            process.start()
            running[slot] = process, f"{slot}-{number}"

        for slot in range(processes):
            start(slot)
        killed, stopped = 0, 0
        asleep: dict[int, tuple[float, float]] = {}
        try:
            while time.monotonic() < until:
                time.sleep(chance.uniform(0.05, 0.3) * 50 / processes)
                wake(folder)
                for slot in [
                    slot for slot, (_, wakes) in asleep.items() if wakes < time.monotonic()
                ]:
                    os.kill(running[slot][0].pid, signal.SIGCONT)
                    sleeps[running[slot][1]].append((asleep.pop(slot)[0], time.monotonic()))
                slot = chance.randrange(processes)
                process, its_name = running[slot]
                if slot in asleep:
                    continue
                if chance.random() < 0.3:
                    process.kill()
                    process.join()
                    died[its_name] = time.monotonic()
                    (folder / "dozing" / its_name).unlink(missing_ok=True)
                    killed += 1
                    start(slot)
                else:  # sometimes past the expiry of what it holds
                    os.kill(process.pid, signal.SIGSTOP)
                    asleep[slot] = (
                        time.monotonic(),
                        time.monotonic() + chance.uniform(0.1, 2 * TTL_S),
                    )
                    stopped += 1
        finally:
            ended = time.monotonic()
            for slot, (since, _) in asleep.items():
                sleeps[running[slot][1]].append((since, ended))
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
        logs = {log.name: _lines(log) for log in (folder / "logs").iterdir()}
        waits = [
            wait
            for name, log in logs.items()
            for wait in awake_waits(log, sleeps[name], died.get(name, ended))
        ]
        turns = sum(line["kind"] == "turn" for log in logs.values() for line in log)
        fair_s = processes * seconds / max(1, turns)
        late, refused, harmful = _late(logs.values())
        return Fought(
            turns=turns,
            work=sum(line["kind"] == "work" for log in logs.values() for line in log),
            unsafe=_unsafe(logs.values()),
            late=late,
            refused=refused,
            harmful=harmful,
            mixed=_mixed(folder),
            killed=killed,
            stopped=stopped,
            lost=lost,
            starved=sum(wait > STARVED * fair_s for wait in waits),
            fair_wait_s=fair_s,
            longest_wait_s=max(waits, default=0.0),
            median_wait_s=statistics.median(waits) if waits else 0.0,
            errors=sum(line["kind"] == "error" for log in logs.values() for line in log),
        )


def _lines(log: Path) -> list[dict[str, Any]]:
    lines = []
    for line in log.read_text().splitlines():
        with contextlib.suppress(ValueError):  # cut short by kill -9
            lines.append(json.loads(line))
    return lines


def awake_waits(
    log: list[dict[str, Any]], sleeps: list[tuple[float, float]], ended: float
) -> list[float]:
    """How long each wait of a process took, ended by its turn or by nothing; without its sleeps, the last long one on."""
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


def _unsafe(logs: Any) -> int:
    """Pieces of work for which the ledger was asked after a newer token had worked on the same device."""
    by_device: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for log in logs:
        for line in log:
            if line["kind"] == "work":
                by_device[line["device"]].append(line)
    return sum(
        any(newer["token"] > old["token"] and newer["at"] < old["asked_at"] for newer in lines)
        for lines in by_device.values()
        for old in lines
    )


def _late(logs: Any) -> tuple[int, int, int]:
    """How many holders woke in the middle of a write when a newer one had worked on the device; were refused; did harm."""
    work = [line for log in logs for line in log if line["kind"] == "work"]
    late = refused = harmful = 0
    for log in logs:
        for woken, following in itertools.pairwise(log):
            if woken["kind"] == "wakes" and any(
                (one["device"], one["at"] < woken["at"]) == (woken["device"], True)
                and one["token"] > woken["token"]
                for one in work
            ):
                late += 1
                refused += following["kind"] == "refused"
                harmful += following.get("counts", False)
    return late, refused, harmful


def _mixed(folder: Path) -> int:
    """Checkpoints that count although their bytes are another token's."""
    stores = [DeviceFolder(device) for device in (folder / "devices").iterdir()]
    return sum(
        store.get(f"checkpoints/step-{one.step:08d}/model") != str(one.token).encode()
        for store in stores
        for one in store.states()
    )


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """A PostgreSQL of Debian's package, with a cluster of its own in a temporary folder; its URL."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        raise FileNotFoundError("PostgreSQL is not installed (make setup-system installs it)")
    as_user = (
        ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        if os.geteuid() == 0
        else []
    )
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=50)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--url", default="sqlite", help="sqlite, postgresql, or the URL of a database"
    )
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
    print(
        f"{given.processes} processes, {given.devices} devices, {given.seconds:g} s, {given.url.split(':')[0]}"
    )
    for name, value in asdict(found).items():
        print(f"  {name:<15} {value:.3g}" if isinstance(value, float) else f"  {name:<15} {value}")


if __name__ == "__main__":
    main()
