"""What deferred tasks wait on, in the triggerer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from trainwright.operators.hooks import settings_of
from trainwright.tasks.settings import overridden

LEAST_POLL_S = 0.1
POLL_SHARE = 0.02
"""of the time that a training has been followed: no later is its end seen, nor later than `look_every_s`"""


def _load() -> None:
    """Import what looking at a run takes, in a thread: the event loop serves many."""
    from trainwright.tasks.runs import run  # noqa: F401


class RunTrigger(BaseTrigger):
    """Looks after a run every so often.

    :param run: the run's URI
    :param holder: in whose name the run and its devices are held
    :param look_every_s: seconds between looks; default: the class's
    :param connections: ids of the connections to store and ledger, by field
    """

    look_every_s: float

    def __init__(
        self,
        run: str,
        holder: str,
        look_every_s: float | None = None,
        connections: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.run_uri, self.holder, self.connections = run, holder, connections or {}
        if look_every_s is not None:
            self.look_every_s = look_every_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The trigger as Airflow keeps it."""
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {
            "run": self.run_uri,
            "holder": self.holder,
            "look_every_s": self.look_every_s,
            "connections": self.connections,
        }


class DevicesTrigger(RunTrigger):
    """Keeps a run's place in the queue for devices, and fires when the run has something to do.

    That is: its turn has come, its pool changed, its `queue_timeout` is over, or its place or hold was lost; the task finds out
    which. The place lives while the trigger does: a task that is killed gives it up.
    """

    look_every_s = 5.0

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until there is something to do. A ledger out of reach is asked again: the run keeps waiting."""
        await asyncio.to_thread(_load)
        from trainwright.tasks.allocate import acquire
        from trainwright.tasks.errors import ServiceUnreachable
        from trainwright.tasks.runs.run import Run

        with overridden(await settings_of(self.connections)):
            run = await asyncio.to_thread(Run, self.run_uri)
            while True:
                try:
                    if await asyncio.to_thread(acquire.look, run, self.holder):
                        break
                except ServiceUnreachable as error:
                    self.log.warning("%s", error)
                await asyncio.sleep(self.look_every_s)
        yield TriggerEvent({"run": self.run_uri})

    async def on_kill(self) -> None:
        """Leave the queue: somebody stopped the task."""
        from trainwright.tasks.allocate import acquire
        from trainwright.tasks.leases.ledger import Holder
        from trainwright.tasks.runs.run import Run

        with overridden(await settings_of(self.connections)):
            await asyncio.to_thread(lambda: acquire.give_up(Run(self.run_uri), Holder(self.holder)))


class TrainingTrigger(RunTrigger):
    """Follows the process that trains a run, its ranks' logs into the task's log, and fires when it has ended.

    It starts and stops nothing when it is moved or started again: the process goes on. Only a task that is killed ends it.
    A short training is looked at more often, so that little is added to it.
    """

    look_every_s = 1.0

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until the process has ended. A ledger out of reach is asked again: the run goes on."""
        await asyncio.to_thread(_load)
        from trainwright.tasks.errors import ServiceUnreachable
        from trainwright.tasks.runs.run import Run
        from trainwright.tasks.train.launcher import background

        with overridden(await settings_of(self.connections)):
            run = await asyncio.to_thread(Run, self.run_uri)
            logs = await asyncio.to_thread(background.Logs, run)
            running, began = True, time.monotonic()
            while running:
                try:
                    running = await asyncio.to_thread(background.launcher, run) is not None
                except ServiceUnreachable as error:
                    self.log.warning("%s", error)
                for line in await asyncio.to_thread(logs.fresh):
                    self.log.info("%s", line)
                if running:
                    pause_s = max(LEAST_POLL_S, POLL_SHARE * (time.monotonic() - began))
                    await asyncio.sleep(min(self.look_every_s, pause_s))
        yield TriggerEvent({"run": self.run_uri})

    async def on_kill(self) -> None:
        """Stop the ranks with a checkpoint, and free the devices: somebody stopped the task."""
        from trainwright.tasks.runs.run import Run
        from trainwright.tasks.train.launcher import background

        with overridden(await settings_of(self.connections)):
            await asyncio.to_thread(lambda: background.stop(Run(self.run_uri), self.holder))
