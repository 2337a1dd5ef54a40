"""Latency of the REST service: cached answers for 50 clients at once, new structures for two.

    python tests/benchmarks/service.py [--clients 50] [--requests 20] [--runs 5] [--pairs 10]

Bars: p99 below 300 ms for cached answers, in each run; p99 below 3 s for two new structures of a
small model at once. The noise floor: the same clients request `GET /devices`, which needs no work.
A run sends the three kinds of requests in random order. Clients and server share this machine's
cores, and each client sends its next request as soon as it has an answer.

The clients are coroutines on bare sockets, so that only the service is timed: fifty threads of an
HTTP library take five times the server's CPU time, and would add their waits for Python's lock and
garbage collection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks" / "service"))
from serving import JOB, JOBS, RUN, SPEC, client, model, serving


def _request(address: str, method: str, path: str, body: str = "") -> bytes:
    head = [
        f"{method} {path} HTTP/1.1",
        f"Host: {urlsplit(address).netloc}",
        f"Authorization: Bearer {RUN}",
        "Content-Type: application/json",
        f"Content-Length: {len(body.encode())}",
    ]
    return ("\r\n".join(head) + "\r\n\r\n" + body).encode()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> int:
    """The status of the answer, after reading all of it."""
    writer.write(request)
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1])


def _at_once(address: str, clients: int, requests: int, ask: Callable[[int], bytes]) -> list[float]:
    """Seconds per answer, of concurrent clients that each send one request after another."""
    took: list[float] = []
    statuses: Counter[int] = Counter()

    async def one(number: int, gate: asyncio.Barrier) -> None:
        where = urlsplit(address)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        await _answer(
            reader, writer, _request(address, "GET", "/devices")
        )  # the connection is open
        await gate.wait()
        for index in range(requests):
            request = ask(number * requests + index)
            started = time.perf_counter()
            statuses[await _answer(reader, writer, request)] += 1
            took.append(time.perf_counter() - started)
        writer.close()

    async def all_of_them() -> None:
        gate = asyncio.Barrier(clients)
        await asyncio.gather(*(one(number, gate) for number in range(clients)))

    asyncio.run(all_of_them())
    if set(statuses) != {200}:
        print("   statuses:", dict(statuses))
    return took


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]


def _line(name: str, seconds: list[float], bar_s: float | None = None) -> None:
    verdict = (
        ""
        if bar_s is None
        else f"   bar {1000 * bar_s:.0f} ms: {'met' if _p99(seconds) < bar_s else 'MISSED'}"
    )
    print(
        f"{name:48} n={len(seconds):5d}  p50 {1000 * statistics.median(seconds):8.1f} ms"
        f"  p99 {1000 * _p99(seconds):8.1f} ms  most {1000 * max(seconds):8.1f} ms{verdict}"
    )


def main() -> None:
    """Print the figures."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--clients", type=int, default=50)
    options.add_argument("--requests", type=int, default=20)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--pairs", type=int, default=10)
    chosen = options.parse_args()
    cnn = (JOBS / "cnn.py").read_text()
    print(f"{len(os.sched_getaffinity(0))} core(s) for clients and server together")
    with (
        tempfile.TemporaryDirectory() as home,
        serving(Path(home), "--workers", "2") as address,
        client(address) as first,
    ):
        structure: Any = first.post(
            "/structures", json={"model": model(cnn, width=8), "spec": SPEC}
        ).json()
        estimate = {"structure": structure, "batch_size": 64, "device_type": "nvidia-t4"}
        sent = {
            "estimates": json.dumps(estimate),
            "plans": json.dumps(JOB | {"structure": structure, "rows": 50_000}),
        }
        print(f"a request with a structure: {len(sent['estimates'])} bytes")
        questions = {"noise floor: GET /devices": _request(address, "GET", "/devices")} | {
            f"cached POST /{name}": _request(address, "POST", f"/{name}", body)
            for name, body in sent.items()
        }
        took: dict[str, list[list[float]]] = {name: [] for name in questions}
        for _ in range(chosen.runs):
            for name, body in sent.items():  # plans are cached for a minute
                first.post(f"/{name}", content=body).raise_for_status()
            for name, request in random.sample(list(questions.items()), len(questions)):
                took[name].append(
                    _at_once(
                        address, chosen.clients, chosen.requests, lambda _, asked=request: asked
                    )
                )
        for name, runs in took.items():
            for number, seconds in enumerate(runs, start=1):
                _line(
                    f"{chosen.clients} clients, {name}, run {number}",
                    seconds,
                    0.3 if "cached" in name else None,
                )

        def new(number: int) -> bytes:
            changed = {"model": model(cnn, width=10 + number), "spec": SPEC}
            return _request(address, "POST", "/structures", json.dumps(changed))

        def fresh(number: int) -> bytes:
            return _request(
                address, "POST", "/estimates", json.dumps(estimate | {"batch_size": 1000 + number})
            )

        _line("2 clients, new POST /structures", _at_once(address, 2, chosen.pairs, new), 3.0)
        _line("1 client, new POST /estimates", _at_once(address, 1, chosen.pairs, fresh))


if __name__ == "__main__":
    main()
