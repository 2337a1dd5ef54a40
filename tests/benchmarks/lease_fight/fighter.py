"""One process of the benchmark `leases`: it takes turns on devices, and logs its actions."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainwright.tasks.errors import RunHeld, ServiceUnreachable
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.spec.train_spec import CheckpointPolicy
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import Content, sha256
from trainwright.tasks.train.checkpoint import fence

TTL_S, PLACE_TTL_S, AGE_S, POLL_S = 2.0, 1.5, 2.0, 0.1
DOZING = 0.05
"""Share of the turns in which the holder stops itself in the middle of a write."""
_POLICY = CheckpointPolicy(keep_last=5)


class DeviceFolder(FolderStore):
    """A device's checkpoints. `doze` is called once, just before the first object is written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.doze: Callable[[], None] | None = None

    def create(self, key: str, data: Content, digest: str | None = None) -> bool:
        """Write, possibly after dozing."""
        self._maybe_doze()
        return super().create(key, data, digest)

    def swap(
        self, key: str, data: Content, version: str | None, digest: str | None = None
    ) -> str | None:
        """Write, possibly after dozing."""
        self._maybe_doze()
        return super().swap(key, data, version, digest)

    def _maybe_doze(self) -> None:
        doze, self.doze = self.doze, None
        if doze is not None:
            doze()

    def states(self) -> list[Any]:
        """The checkpoints that count, by step."""
        found = []
        for entry in fence.read_index(self)[0].checkpoints:
            with contextlib.suppress(FileNotFoundError):  # its holder has just dropped it
                state = self.get(f"{fence.folder_name(entry.step)}/{fence.STATE}")
                found.append(SimpleNamespace(**json.loads(state)))
        return found


def fight(url: str, folder: Path, name: str, seed: int, until: float) -> None:
    """Take turns until `until`. The process's main function."""
    random.seed(seed)
    _Fighter(url, folder, f"{name}-{seed}", until).run()


class _Fighter:
    """A run that takes turns; each event is a line in its log."""

    def __init__(self, url: str, folder: Path, run: str, until: float) -> None:
        self._run, self._folder, self._until = run, folder, until
        self._ledger = Ledger(url)
        self._queue = Queue(self._ledger, AGE_S)
        self._me = Holder(run)  # no pid: only expiry ends a killed process's leases
        self._devices = sorted(path.name for path in (folder / "devices").iterdir())
        self._log = (folder / "logs" / run).open("a", buffering=1)

    def run(self) -> None:
        """Take one turn after another."""
        while time.monotonic() < self._until:
            try:
                self._turn(random.sample(self._devices, random.randint(1, 3)))
            except ServiceUnreachable as error:
                self._note("error", text=str(error))

    def _note(self, kind: str, **fields: object) -> None:
        self._log.write(json.dumps({"kind": kind, "at": time.monotonic(), **fields}) + "\n")

    def _turn(self, wanted: list[str]) -> None:
        """Wait, work, release."""
        token = self._wait(wanted)
        if token is None:
            self._queue.leave(self._run)
            return
        self._note("turn")
        stores = {name: DeviceFolder(self._folder / "devices" / name) for name in wanted}
        try:
            rights = {name: fence.claim(store, token) for name, store in stores.items()}
            if random.random() < DOZING:
                name = random.choice(wanted)
                stores[name].doze = lambda: self._doze(name, token)
            for _ in range(random.randint(1, 4)):
                asked_at = time.monotonic()
                held = self._ledger.renew(
                    self._run, wanted, TTL_S, holder=self._me.name, token=token
                )
                if not held or self._ledger.revoked_by(self._run):
                    break
                for name, store in stores.items():
                    self._work(name, store, rights[name], token, asked_at)
                time.sleep(random.uniform(0, 0.05))
        except RunHeld:
            self._note("refused", token=token)
        self._ledger.release(self._run, wanted, holder=self._me.name, token=token)

    def _wait(self, wanted: list[str]) -> int | None:
        """Wait in the queue for these devices and take them; the token, or None at the end."""
        priority = random.randint(0, 2)
        self._note("waits")
        while time.monotonic() < self._until:
            turn = self._queue.look(
                self._run, self._me, wanted, len(wanted), ttl_s=PLACE_TTL_S, priority=priority
            )
            if turn.available.issuperset(wanted):
                token = self._queue.take(
                    self._run, self._me, wanted, ttl_s=TTL_S, priority=priority
                )
                if token is not None:
                    return token
            time.sleep(POLL_S * min(1 + turn.rivals, 8) * random.uniform(0.5, 1.5))
        return None

    def _work(
        self, name: str, store: DeviceFolder, right: fence.Fence, token: int, asked_at: float
    ) -> None:
        """Write a checkpoint, which drops old ones."""
        step = 1 + max((one.step for one in store.states()), default=0)
        where = fence.folder_name(step)
        state = json.dumps({"step": step, "token": token}).encode()
        right.put(f"{where}/model", str(token).encode())
        right.put(f"{where}/{fence.STATE}", state)
        right.commit(fence.Entry(step, sha256(state)), ["model"], _POLICY)
        counts = any((one.token, one.step) == (token, step) for one in store.states())
        self._note("work", device=name, token=token, step=step, asked_at=asked_at, counts=counts)

    def _doze(self, device: str, token: int) -> None:
        """Stop until another process has worked on the device (`wake` continues it)."""
        note = self._folder / "dozing" / self._run
        part = note.with_suffix(".part")
        part.write_text(json.dumps({"pid": os.getpid(), "device": device, "token": token}))
        part.rename(note)
        self._note("dozes", device=device, token=token)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._note("wakes", device=device, token=token)


def wake(folder: Path) -> None:
    """Continue the dozing processes on whose device another process has worked since."""
    for note in (folder / "dozing").glob("*[0-9]"):
        dozing = json.loads(note.read_text())
        states = DeviceFolder(folder / "devices" / dozing["device"]).states()
        if any(one.token > dozing["token"] for one in states):
            with contextlib.suppress(ProcessLookupError):
                os.kill(dozing["pid"], signal.SIGCONT)
            note.unlink()
