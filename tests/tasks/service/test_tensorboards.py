"""The service's TensorBoards: none outlives the service."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import psutil
from finished_run import begin_run

from trainwright.tasks.service.records.tensorboards import TensorBoards


def running() -> list[psutil.Process]:
    """The TensorBoard processes below this process."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("tensorboard.main" in word for word in process.cmdline()):
                found.append(process)
    return found


def test_a_tensorboard_keeps_starting_after_its_caller_has_left(home: Path) -> None:
    run = begin_run(f"file://{home / 'store'}", "small", 1)
    run.objects.put("events/events.out.tfevents.1.here", b"")

    async def leave_and_come_again() -> None:
        asked = asyncio.create_task(tensorboards.open(run))
        while not running():
            await asyncio.sleep(0.05)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        secret = await tensorboards.open(run)
        [process] = running()
        assert secret
        assert not any(secret in word for word in process.cmdline())  # any user may read it
        # it ends with the thread that started it: the event loop's

    tensorboards = TensorBoards()
    try:
        asyncio.run(leave_and_come_again())
    finally:
        tensorboards.close()
    assert running() == []


def test_a_tensorboard_that_starts_during_the_services_shutdown_ends_too(home: Path) -> None:
    run = begin_run(f"file://{home / 'store'}", "small", 1)
    run.objects.put("events/events.out.tfevents.1.here", b"")

    async def end_meanwhile() -> None:
        tensorboards = TensorBoards()
        asked = asyncio.create_task(tensorboards.open(run))
        while not running():
            await asyncio.sleep(0.05)
        tensorboards.close()
        await asyncio.wait({asked})
        assert "the service is shutting down" in str(asked.exception())

    asyncio.run(end_meanwhile())
    assert running() == []
