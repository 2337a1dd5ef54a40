"""The service's sandbox server starts when needed, and again after a kill."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from trainwright.infra.sandbox import SandboxLimits
from trainwright.infra.sandbox.client import scrubbed_environment
from trainwright.tasks.errors import TrainwrightError
from trainwright.tasks.service.compute.async_sandbox import AsyncSandbox

EARLIER: dict[str, list[psutil.Process]] = {"children": []}


@pytest.fixture(autouse=True)
def _earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children that the test process already has, such as the session's S3 server."""
    monkeypatch.setitem(EARLIER, "children", psutil.Process().children())


def own_children() -> list[psutil.Process]:
    """The children of this test."""
    return [one for one in psutil.Process().children() if one not in EARLIER["children"]]


def _sandbox(function: str) -> AsyncSandbox:
    environment = scrubbed_environment()
    limits = SandboxLimits(60, 2**30)
    return AsyncSandbox(function, limits, confined=True, warm_up={}, environment=environment)


def test_a_killed_server_restarts_for_the_next_request() -> None:
    async def killed_in_between() -> list[bytes]:
        sandbox = _sandbox("json:dumps")
        try:
            first = await sandbox.ask({"number": 1})
            (server,) = own_children()
            server.kill()
            server.wait()
            return [first.answer, (await sandbox.ask({"number": 2})).answer]
        finally:
            sandbox.close()

    assert asyncio.run(killed_in_between()) == [b'{"number": 1}', b'{"number": 2}']


def test_a_server_that_does_not_start_gives_each_request_an_error() -> None:
    async def asked_twice() -> None:
        sandbox = _sandbox("no_such_module:answer")
        for _ in range(2):
            with pytest.raises(TrainwrightError, match="its server did not start: ModuleNotFound"):
                await sandbox.ask({})
        assert not own_children()

    asyncio.run(asked_twice())


def test_concurrent_requests_start_one_server() -> None:
    async def at_once() -> None:
        sandbox = _sandbox("json:dumps")
        try:
            await asyncio.gather(*(sandbox.ask({"number": number}) for number in range(5)))
            assert len(own_children()) == 1
        finally:
            sandbox.close()

    asyncio.run(at_once())
