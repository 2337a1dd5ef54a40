"""Predicted against measured all-reduce on this machine.

    python tests/benchmarks/all_reduce.py [ROUNDS] [RANKS ...]

Each round (default 3) measures the link as planning does, and times sums as training does them:
with torch.distributed and with Horovod, between the given numbers of ranks (default 2 and 3), in
random order, each in new processes. The sizes differ from those that the link is fitted to. Prints
the prediction of each sum beside the median over rounds and their range; then median, p90 and bias
of the error, the share inside the 90 % interval, and the noise floor: the difference between two
rounds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

from trainwright.estimator.curves import Interval
from trainwright.estimator.measure.all_reduce import measure_samples
from trainwright.estimator.predict.communication import HOROVOD_CYCLE_S, Link, all_reduce, fit_link
from trainwright.estimator.quantiles import quantile

SIZES_BYTES = [3 << power for power in range(9, 24)]  # 1.5 KiB to 24 MiB
WARM_UP, SWEEPS = 3, 5
LINK_S = 3.0
TIMEOUT_S = 120.0
LOOPBACK = "127.0.0.1"


def repeats(size: int) -> int:
    return max(2, min(20, (4 << 20) // size))


def take_part(backend: str, rank: int, count: int, folder: Path, seed: int) -> None:
    """One rank: sums the sizes in a shared random order; rank 0 writes (bytes, mean seconds)."""
    import torch

    from trainwright.tasks.train.exchange.collective import (
        Collective,
        HorovodCollective,
        TorchCollective,
    )

    torch.set_num_threads(1)
    collective: Collective = (
        HorovodCollective()
        if backend == "horovod"
        else TorchCollective(rank, count, str(folder / "meeting"))
    )
    whole, draw, seen = torch.zeros(SIZES_BYTES[-1] // 4), random.Random(seed), []
    for sweep in range(SWEEPS):
        for size in draw.sample(SIZES_BYTES, len(SIZES_BYTES)):
            part = whole[: size // 4]
            for _ in range(WARM_UP if sweep == 0 else 1):
                collective.sum_(part, f"sum.{size}")
            started = time.perf_counter()
            for _ in range(repeats(size)):
                collective.sum_(part, f"sum.{size}")
            seen.append((size, (time.perf_counter() - started) / repeats(size)))
    if rank == 0:
        (folder / "seen").write_text(json.dumps(seen))
    collective.shutdown()


@contextmanager
def rendezvous(count: int) -> Any:
    """Start Horovod's rendezvous as training does; yields the ranks' environment."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((LOOPBACK, 0), RendezvousHandler, 0)
    server.init(get_host_assignments(parse_hosts(f"localhost:{count}"), count))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_address[1]),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_FUSION_THRESHOLD": "0",
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_SIZE": str(count),
            "HOROVOD_LOCAL_SIZE": str(count),
        }
    finally:
        server.shutdown()
        server.server_close()


def sums(backend: str, count: int, seed: int) -> dict[int, float]:
    """Median seconds of a sum by its size in bytes, from one launch."""
    with tempfile.TemporaryDirectory() as name:
        common = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        if backend == "horovod":
            with rendezvous(count) as environment:
                launch(backend, count, name, seed, common | environment)
        else:
            launch(backend, count, name, seed, common)
        times = defaultdict(list)
        for size, seconds in json.loads((Path(name) / "seen").read_text()):
            times[size].append(seconds)
    return {size: statistics.median(group) for size, group in times.items()}


def launch(backend: str, count: int, folder: str, seed: int, common: dict[str, str]) -> None:
    command = [sys.executable, __file__, "--rank", backend]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(count), folder, str(seed)],
            env=os.environ | common | {"HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    try:
        for one in ranks:
            if one.wait(TIMEOUT_S) != 0:
                raise SystemExit(f"{backend}: a rank exited with {one.returncode}")
    finally:
        for one in ranks:
            one.kill()
            one.wait()


def predicted(link: Link, backend: str, size: int, count: int) -> Interval:
    """The time of one of many consecutive sums.

    Horovod starts at most one sum per cycle: max(t, cycle), plus up to one cycle of waiting.
    """
    time = all_reduce(link, size, count)
    cycle = HOROVOD_CYCLE_S if backend == "horovod" else 0.0
    return Interval(
        median=max(time.median, cycle), low=max(time.low, cycle), high=max(time.high, cycle) + cycle
    )


def main(rounds: int, counts: list[int]) -> None:
    """Measure, compare, print one table for each library and number of ranks."""
    backends = ["torch", "horovod"] if importlib.util.find_spec("horovod") else ["torch"]
    cases = [(backend, count) for backend in backends for count in counts]
    measured: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    samples = []
    for number in range(rounds):
        for case in random.Random(number).sample([None, *cases], len(cases) + 1):
            if case is None:
                samples += measure_samples(LOOPBACK, LINK_S, seed=number)[0]
                continue
            for size, seconds in sums(*case, seed=number).items():
                measured[*case, size].append(seconds)
    link = fit_link(samples)
    print(
        f"link: latency {link.latency_s * 1e6:.0f} us, "
        f"bandwidth {link.bandwidth_bytes_per_s / 1e9:.2f} GB/s, "
        f"spread {100 * link.spread:.0f} %, from {len(samples)} samples"
    )
    for backend, count in cases:
        print(
            f"\n{backend}, {count} ranks: {rounds} rounds\n"
            f"{'bytes':>10} {'predicted':>12} {'measured':>12}  lowest..highest"
        )
        errors, inside, noise = [], 0, []
        for size in SIZES_BYTES:
            seen, guess = measured[backend, count, size], predicted(link, backend, size, count)
            middle = statistics.median(seen)
            errors.append(guess.median / middle - 1)
            inside += guess.low <= middle <= guess.high
            noise += [abs(one / other - 1) for one, other in combinations(seen, 2)]
            print(
                f"{size:10d} {guess.median * 1e3:9.2f} ms {middle * 1e3:9.2f} ms  "
                f"{min(seen) * 1e3:.2f}..{max(seen) * 1e3:.2f}  {100 * errors[-1]:+.0f} %"
            )
        size_of = [abs(one) for one in errors]
        print(
            f"error: median {100 * statistics.median(size_of):.0f} %, "
            f"p90 {100 * quantile(size_of, 0.9):.0f} %, "
            f"bias {100 * statistics.median(errors):+.0f} %; "
            f"inside the 90 % interval: {inside} of {len(errors)}"
        )
        if noise:
            print(
                f"noise floor, one round against another: "
                f"median {100 * statistics.median(noise):.0f} %, "
                f"p90 {100 * quantile(noise, 0.9):.0f} %"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        take_part(
            sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), int(sys.argv[6])
        )
    else:
        main(
            int(sys.argv[1]) if len(sys.argv) > 1 else 3,
            [int(one) for one in sys.argv[2:]] or [2, 3],
        )
