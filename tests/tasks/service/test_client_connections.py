"""Bounds of connections: a real server of uvicorn, with short limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn

from trainwright.tasks.service.client_connections import (
    ConnectionLimits,
    OncePerEpisode,
    bounded_protocol,
)

LIMITS = ConnectionLimits(
    connections=12, of_client=8, head_s=0.6, body_s=0.6, write_s=0.6, head_bytes=2000
)
GET = b"GET /%s HTTP/1.1\r\nHost: h\r\n\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def application(scope: dict[str, str], receive: object, send: object) -> None:
    """Answers with 10 bytes, or with 64 MiB, without reading the body."""
    body = bytes(2**26 if scope["path"] == "/much" else 10)
    await send({"type": "http.response.start", "status": 200})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": body})  # type: ignore[operator]


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[int]:
    """The port of a server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            application,  # type: ignore[arg-type]
            http=bounded_protocol(LIMITS),
            h11_max_incomplete_event_size=LIMITS.head_bytes,
            lifespan="off",
            log_level="warning",
        )
        running = uvicorn.Server(config)
        task = asyncio.create_task(running.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            running.should_exit = True
            await task


async def opened(port: int, data: bytes = b"", address: str = "127.0.0.1") -> Stream:
    stream = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    stream[1].write(data)
    return stream


async def status(port: int) -> bytes:
    reader, writer = await opened(port, GET % b"")
    line = await reader.readline()
    writer.close()
    return line


async def ended(stream: Stream, trickle: bytes = b"") -> bytes:
    """What arrives until the server ends the connection, while bytes trickle to it."""
    reader, writer = stream
    received = asyncio.create_task(reader.read())
    while not received.done():
        with contextlib.suppress(OSError):
            writer.write(trickle)
        await asyncio.sleep(0.05)
    writer.close()
    return b"" if received.exception() else received.result()


def test_many_silent_clients_do_not_keep_others_out(caplog: pytest.LogCaptureFixture) -> None:
    once = OncePerEpisode()
    caplog.handler.addFilter(once)

    async def check() -> None:
        async with server() as port:
            silent = [await opened(port) for _ in range(30)]
            assert await status(port) == b"HTTP/1.1 200 OK\r\n"
            others = [await opened(port, address="127.0.0.2") for _ in range(30)]
            assert await status(port) == b"HTTP/1.1 200 OK\r\n"
            for stream in silent + others:
                assert await ended(stream) == b""

    asyncio.run(check())
    assert 1 <= len(caplog.records) <= 3  # one a kind of episode


@pytest.mark.parametrize(
    ("sent", "trickle"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nHost: h\r\n", b"a: b\r\n"),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999\r\n\r\n", b"x"),
        (GET % b"", b"\r\n"),
        (GET % b"", b"GET / HTTP"),
    ],
    ids=["silent", "slow headers", "slow body", "empty lines after an answer", "half a request"],
)
def test_a_request_that_trickles_is_ended(sent: bytes, trickle: bytes) -> None:
    async def check() -> None:
        async with server() as port:
            await asyncio.wait_for(ended(await opened(port, sent), trickle), 20)

    asyncio.run(check())


def test_headers_that_are_too_large_are_refused_and_an_answer_nobody_takes_is_ended() -> None:
    async def check() -> None:
        async with server() as port:
            much = await opened(port, b"GET / HTTP/1.1\r\na: " + bytes(100 * b"x" * 1000))
            assert (await much[0].readline()).startswith(b"HTTP/1.1 400")
            reader, _ = await opened(port, GET % b"much")
            await asyncio.sleep(2)
            with contextlib.suppress(ConnectionError):
                assert len(await reader.read()) < 2**26

    asyncio.run(check())


def test_a_message_is_logged_once_an_episode_and_failures_always() -> None:
    once = OncePerEpisode()

    def passes(message: str, error: object = None) -> bool:
        info = None if error is None else (ValueError, ValueError(), None)
        return once.filter(logging.LogRecord("a", 30, "", 1, message, (), info))

    assert [passes("one"), passes("one"), passes("two"), passes("one")] == [
        True,
        False,
        True,
        False,
    ]
    assert passes("failed", 1)
    assert passes("failed", 1)
