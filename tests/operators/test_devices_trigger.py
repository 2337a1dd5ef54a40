"""The reports of a deferred task's run while it waits for devices."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import doors
import pytest
from train.training_case import planned

from trainwright.operators.triggers import DevicesTrigger
from trainwright.tasks.allocate import acquire
from trainwright.tasks.chain import PROGRESS
from trainwright.tasks.errors import MustWait
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.spec.job import Job

PLAN = planned([{"type": "cpu", "cores": 1.0}], [8])


def test_a_run_that_moves_up_in_the_queue_reports_its_place_to_followers(
    home: Path, tmp_path: Path
) -> None:
    queue, devices = Queue(doors.ledger()), PLAN.resources("")
    assert queue.take("holds", Holder("holds"), devices) is not None
    queue.look("ahead", Holder("ahead"), devices, len(devices))
    job = Job.model_validate({"name": "waits", "data": {"uri": "builtin:digits"}})
    run = doors.open_for(job, Holder("waits"), store=(tmp_path / "store").as_uri())
    run.write(PLAN)
    with pytest.raises(MustWait):
        acquire.lease(doors.attach(run, defers=True), PLAN)
    followed = run.work_folder() / PROGRESS
    followed.touch()

    def places() -> list[int]:
        return [json.loads(line)["place"] for line in followed.read_text().splitlines()]

    async def wait() -> None:
        pending = asyncio.ensure_future(anext(DevicesTrigger(run.uri, "waits", 0.05).run()))
        while places() != [2]:
            await asyncio.sleep(0.05)
        queue.leave("ahead")
        while places() != [2, 1]:
            await asyncio.sleep(0.05)
        doors.ledger().release("holds")
        await pending

    asyncio.run(asyncio.wait_for(wait(), 60))
    assert places() == [2, 1]
