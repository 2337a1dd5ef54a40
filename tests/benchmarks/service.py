"""What the REST service answers, and how quickly: cached answers for 50 clients at once, new structures for two.

    python tests/benchmarks/service.py [--clients 50] [--requests 20] [--pairs 10]

Bars: p99 below 300 ms for cached answers; p99 below 3 s for two new structures of a small model at once. Beside them the noise
floor: the same clients asking for `GET /devices`, which is no work. Clients and server share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks" / "service"))
from serving import JOB, JOBS, SPEC, client, model, serving

ROUNDS = 3


def _at_once(
    address: str, clients: int, requests: int, ask: Callable[[httpx.Client, int], httpx.Response]
) -> list[float]:
    """Seconds that each answer took, of so many clients that ask one after the other each."""
    took: list[float] = []
    statuses: Counter[int] = Counter()
    gate = threading.Barrier(clients)

    def one(number: int) -> None:
        with client(address) as session:
            session.get("/devices")  # the connection
            gate.wait()
            for index in range(requests):
                started = time.perf_counter()
                answer = ask(session, number * requests + index)
                took.append(time.perf_counter() - started)
                statuses[answer.status_code] += 1

    threads = [threading.Thread(target=one, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if set(statuses) != {200}:
        print("   statuses:", dict(statuses))
    return took


def _line(name: str, seconds: list[float], bar_s: float | None = None) -> None:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    verdict = "" if bar_s is None else f"   bar {1000 * bar_s:.0f} ms: {'met' if p99 < bar_s else 'MISSED'}"
    print(
        f"{name:44} n={len(ordered):5d}  p50 {1000 * statistics.median(ordered):8.1f} ms  p99 {1000 * p99:8.1f} ms"
        f"  most {1000 * ordered[-1]:8.1f} ms{verdict}"
    )


def main() -> None:
    """Print the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--clients", type=int, default=50)
    options.add_argument("--requests", type=int, default=20)
    options.add_argument("--pairs", type=int, default=10)
    chosen = options.parse_args()
    cnn = (JOBS / "cnn.py").read_text()
    print(f"{len(os.sched_getaffinity(0))} core(s) for clients and server together")
    with (
        tempfile.TemporaryDirectory() as home,
        serving(Path(home), "--workers", "2") as address,
        client(address) as first,
    ):
        structure: Any = first.post("/structures", json={"model": model(cnn, width=8), "spec": SPEC}).json()
        estimate = {"structure": structure, "batch_size": 64, "device_type": "nvidia-t4"}
        plan = JOB | {"structure": structure, "rows": 50_000}
        sent = {"estimate": json.dumps(estimate), "plan": json.dumps(plan)}
        print(f"a request with a structure: {len(sent['estimate'])} bytes")
        for name in sent:
            first.post(f"/{name}s", content=sent[name]).raise_for_status()
        questions: dict[str, Callable[[httpx.Client, int], httpx.Response]] = {
            "noise floor: GET /devices": lambda session, _: session.get("/devices"),
            "cached POST /estimates": lambda session, _: session.post("/estimates", content=sent["estimate"]),
            "cached POST /plans": lambda session, _: session.post("/plans", content=sent["plan"]),
        }
        took: dict[str, list[float]] = {name: [] for name in questions}
        for _ in range(ROUNDS):
            for name, ask in random.sample(list(questions.items()), len(questions)):
                took[name] += _at_once(address, chosen.clients, chosen.requests // ROUNDS + 1, ask)
        for name, seconds in took.items():
            _line(f"{chosen.clients} clients, {name}", seconds, 0.3 if "cached" in name else None)

        def new(session: httpx.Client, number: int) -> httpx.Response:
            return session.post("/structures", json={"model": model(cnn, width=10 + number), "spec": SPEC})

        _line("2 clients, new POST /structures", _at_once(address, 2, chosen.pairs, new), 3.0)
        fresh = [estimate | {"batch_size": 1000 + number} for number in range(chosen.pairs)]
        _line(
            "1 client, new POST /estimates",
            _at_once(address, 1, len(fresh), lambda s, n: s.post("/estimates", json=fresh[n])),
        )


if __name__ == "__main__":
    main()
