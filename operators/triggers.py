"""Triggers of deferred tasks: a turn in the queue for devices, the end of a training."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from trainwright.operators.failures import airflows_words
from trainwright.operators.hooks import settings_of

if TYPE_CHECKING:
    from trainwright.tasks.context import RunContext

LEAST_POLL_S = 0.1
POLL_SHARE = 0.02
"""Interval between two polls as a share of the time since the start, up to `look_every_s`."""


class RunTrigger(BaseTrigger):
    """Polls a run.

    :param run: the run's URI
    :param holder: the holder of the run and its devices
    :param look_every_s: seconds between polls; default: the class's value
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
        """The trigger in the form that Airflow stores."""
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {
            "run": self.run_uri,
            "holder": self.holder,
            "look_every_s": self.look_every_s,
            "connections": self.connections,
        }

    async def context(self) -> RunContext:
        """The run's context. Made in a thread, because the event loop serves many triggers."""

        def attach() -> RunContext:
            from trainwright.tasks.context import RunContext
            from trainwright.tasks.runs.run import Run

            run = Run(self.run_uri, settings_of(self.connections))
            return RunContext.attach(run, self.holder)

        return await asyncio.to_thread(attach)


class DevicesTrigger(RunTrigger):
    """Keeps a run's place in the queue for devices, and fires when the task must act.

    The task must act if its turn has come, its pool has changed, its `queue_timeout` is over, or it
    has lost its place or the run; it finds out which. A killed task leaves the queue.
    """

    look_every_s = 5.0

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll until the task must act. Retries while the ledger is unreachable."""
        context = await self.context()
        from trainwright.tasks.allocate import acquire
        from trainwright.tasks.chain import following
        from trainwright.tasks.errors import ServiceUnreachable

        def look() -> bool:
            with following(context.run):
                return acquire.look(context)

        while True:
            try:
                if await asyncio.to_thread(look):
                    break
            except ServiceUnreachable as error:
                self.log.warning("%s", error)
            await asyncio.sleep(self.look_every_s)
        yield TriggerEvent({"run": self.run_uri})

    async def on_kill(self) -> None:
        """Leave the queue after the task was stopped."""
        context = await self.context()
        from trainwright.tasks.allocate import acquire

        await asyncio.to_thread(acquire.leave_queue, context)


class TrainingTrigger(RunTrigger):
    """Follows a run's training process, relays its ranks' logs, and fires when it has ended.

    If the trigger moves to another triggerer or restarts, the process continues; only a killed
    task ends it. Short trainings are polled more often, so that the polling adds little to their
    time.
    """

    look_every_s = 1.0

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll until the process has ended. Retries while the ledger is unreachable."""
        context = await self.context()
        from trainwright.tasks.errors import ServiceUnreachable
        from trainwright.tasks.train.launcher import background

        logs = await asyncio.to_thread(background.Logs, context.run)
        running, began = True, time.monotonic()
        while running:
            try:
                running = await asyncio.to_thread(background.launcher, context.run) is not None
            except ServiceUnreachable as error:
                self.log.warning("%s", error)
            for line in await asyncio.to_thread(logs.fresh):
                self.log.info("%s", airflows_words(line))
            if running:
                pause_s = max(LEAST_POLL_S, POLL_SHARE * (time.monotonic() - began))
                await asyncio.sleep(min(self.look_every_s, pause_s))
        yield TriggerEvent({"run": self.run_uri})

    async def on_kill(self) -> None:
        """After the task was stopped: save a checkpoint, stop the ranks, free the devices."""
        context = await self.context()
        from trainwright.tasks.train.launcher import background

        await asyncio.to_thread(background.stop, context)
