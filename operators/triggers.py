"""What deferred tasks wait on, in the triggerer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent


class DevicesTrigger(BaseTrigger):
    """Keeps a run's place in the queue for devices, and fires when the run has something to do.

    That is: its turn has come, its pool changed, its `queue_timeout` is over, or its place or hold was lost; the task finds out
    which. The place lives while the trigger does: a task that is killed gives it up.

    :param run: the run's URI
    :param holder: in whose name the run is held
    :param look_every_s: seconds between looks
    """

    def __init__(self, run: str, holder: str, look_every_s: float = 5.0) -> None:
        super().__init__()
        self.run_uri, self.holder, self.look_every_s = run, holder, look_every_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The trigger as Airflow keeps it."""
        values = {"run": self.run_uri, "holder": self.holder, "look_every_s": self.look_every_s}
        return "trainwright.operators.triggers.DevicesTrigger", values

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until there is something to do. A ledger out of reach is asked again: the run keeps waiting."""
        from trainwright.tasks import leasing
        from trainwright.tasks.errors import ServiceUnreachable
        from trainwright.tasks.run import Run

        run = await asyncio.to_thread(Run, self.run_uri)
        while True:
            try:
                if await asyncio.to_thread(leasing.look, run, self.holder):
                    break
            except ServiceUnreachable as error:
                self.log.warning("%s", error)
            await asyncio.sleep(self.look_every_s)
        yield TriggerEvent({"run": self.run_uri})

    async def on_kill(self) -> None:
        """Leave the queue: somebody stopped the task."""
        from trainwright.tasks import leasing
        from trainwright.tasks.allocate.ledger import Holder
        from trainwright.tasks.run import Run

        await asyncio.to_thread(lambda: leasing.give_up(Run(self.run_uri), Holder(self.holder)))
