"""The TensorBoards that the service runs: none is left behind."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import psutil
from finished_run import begin_run

from trainwright.tasks.service.records.tensorboards import TensorBoards


def running() -> list[psutil.Process]:
    """The TensorBoards below this process."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "tensorboard.main" in process.cmdline():
                found.append(process)
    return found


def test_one_whose_asker_has_left_meanwhile_is_kept_for_the_next(home: Path) -> None:
    run = begin_run(f"file://{home / 'store'}", "small", 1)
    run.objects.put("events/events.out.tfevents.1.here", b"")

    async def leave_and_come_again() -> None:
        asked = asyncio.create_task(tensorboards.open(run))
        while not running():
            await asyncio.sleep(0.05)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        assert await tensorboards.open(run)
        assert len(running()) == 1  # it ends with the thread that started it, which is the loop's

    tensorboards = TensorBoards()
    try:
        asyncio.run(leave_and_come_again())
    finally:
        tensorboards.close()
    assert running() == []


def test_one_that_starts_while_the_service_ends_ends_too(home: Path) -> None:
    run = begin_run(f"file://{home / 'store'}", "small", 1)
    run.objects.put("events/events.out.tfevents.1.here", b"")

    async def end_meanwhile() -> None:
        tensorboards = TensorBoards()
        asked = asyncio.create_task(tensorboards.open(run))
        while not running():
            await asyncio.sleep(0.05)
        tensorboards.close()
        await asyncio.wait({asked})
        assert "the service is ending" in str(asked.exception())

    asyncio.run(end_meanwhile())
    assert running() == []
