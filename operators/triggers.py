"""What deferred tasks wait on, in the triggerer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from trainwright.operators.hooks import settings_in_triggerer

if TYPE_CHECKING:
    from trainwright.tasks.context import RunContext

LEAST_POLL_S = 0.1
POLL_SHARE = 0.02
"""of the time that a training has been followed: no later is its end seen, nor later than `look_every_s`"""


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

    async def context(self) -> RunContext:
        """The run, on behalf of its holder. Made in a thread: the event loop serves many triggers."""
        settings = await settings_in_triggerer(self.connections)

        def attach() -> RunContext:
            from trainwright.tasks.context import RunContext
            from trainwright.tasks.runs.run import Run

            return RunContext.attach(Run(self.run_uri, settings), self.holder)

        return await asyncio.to_thread(attach)


class DevicesTrigger(RunTrigger):
    """Keeps a run's place in the queue for devices, and fires when the run has something to do.

    That is: its turn has come, its pool changed, its `queue_timeout` is over, or its place or hold was
    lost; the task finds out which. The place lasts as long as the trigger: a killed task gives it up.
    """

    look_every_s = 5.0

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until there is something to do. An unreachable ledger is asked again."""
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
        """Leave the queue: the task was stopped."""
        context = await self.context()
        from trainwright.tasks.allocate import acquire

        await asyncio.to_thread(acquire.leave_queue, context)


class TrainingTrigger(RunTrigger):
    """Follows the training process of a run, relays its ranks' logs, and fires when it has ended.

    Moved to another triggerer, or started again, it stops nothing: the process continues. Only a killed
    task ends it. A short training is looked at more often, so that little time is added to it.
    """

    look_every_s = 1.0

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until the process has ended. An unreachable ledger is asked again."""
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
                self.log.info("%s", line)
            if running:
                pause_s = max(LEAST_POLL_S, POLL_SHARE * (time.monotonic() - began))
                await asyncio.sleep(min(self.look_every_s, pause_s))
        yield TriggerEvent({"run": self.run_uri})

    async def on_kill(self) -> None:
        """Stop the ranks with a checkpoint, and free the devices: the task was stopped."""
        context = await self.context()
        from trainwright.tasks.train.launcher import background

        await asyncio.to_thread(background.stop, context)
