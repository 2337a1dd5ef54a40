"""Measures all-reduce between two ranks of this machine, each a process that loads torch; what starts them loads none.

`python -m trainwright.estimator.measure.all_reduce --out FILE [--address 127.0.0.1] [--budget 5]`

The ranks meet through a file and speak Gloo over the interface that has the address. Sizes come in random order, round after
round, each time the mean over some all-reduces; the link is fitted to all of them (`communication.fit_link`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainwright.estimator.errors import BadInput, BusyMachine, TrainwrightError
from trainwright.estimator.interfaces import interface_of
from trainwright.estimator.named_file import require_space, write_named
from trainwright.estimator.predict.communication import Link, fit_link

LEAST_BUDGET_S, MOST_BUDGET_S = 0.2, 60.0
SIZES_BYTES = tuple(1 << power for power in range(10, 26))  # 1 KiB to 32 MiB
_RANKS = 2
_MEET_S = 180.0  # to load torch and to meet, where others use the machine too; a rank that ends is noticed at once
_LEAST_S = 3e-3  # of all-reduces timed at once
_MOST_REPEATS = 50
_ELEMENT_BYTES = 4
_LOOK_EVERY_S = 0.02
Sample = tuple[float, int, float]


def measure_link(address: str = "127.0.0.1", budget_s: float = 5.0, seed: int = 0) -> Link:
    """The link between two ranks of this machine, measured for so many seconds.

    Loading torch is not counted, and one round over all sizes is measured whatever the budget. Raises BadInput for an
    address that is not this machine's or a budget out of bounds, BusyMachine where the ranks do not meet in time,
    TrainwrightError where one fails.
    """
    return fit_link(measure_samples(address, budget_s, seed))


def measure_samples(
    address: str = "127.0.0.1", budget_s: float = 5.0, seed: int = 0
) -> list[Sample]:
    """What `measure_link` fits: (bytes, ranks, seconds), in the order in which they were measured. Raises as it does."""
    if not LEAST_BUDGET_S <= budget_s <= MOST_BUDGET_S:
        raise BadInput(
            f"--budget: got {budget_s:g}; allowed: {LEAST_BUDGET_S:g} to {MOST_BUDGET_S:g} s"
        )
    interface = _interface_of(address)
    with tempfile.TemporaryDirectory(prefix="trainwright-link-") as name, ExitStack() as ranks:
        folder = Path(name)
        order = [
            "--folder",
            name,
            "--interface",
            interface,
            "--budget",
            str(budget_s),
            "--seed",
            str(seed),
        ]
        processes = [ranks.enter_context(_running(rank, order, folder)) for rank in range(_RANKS)]
        deadline = time.monotonic() + _MEET_S + 2 * budget_s
        while processes[0].poll() != 0:  # it has the samples
            for rank, process in enumerate(processes):
                if process.poll():
                    raise TrainwrightError(
                        f"link: rank {rank} ended with {process.returncode}: {_last_line(folder / f'errors.{rank}')}"
                    )
            if time.monotonic() > deadline:
                raise BusyMachine(
                    f"link: no answer after {_MEET_S + 2 * budget_s:.0f} s over {address} ({interface}); the machine does too "
                    "much else: measure it when it is quiet"
                )
            time.sleep(_LOOK_EVERY_S)
        return [
            (size, count, seconds)
            for size, count, seconds in json.loads((folder / "samples").read_text())
        ]


@contextmanager
def _running(rank: int, order: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A rank, which is killed at the end of the block; it holds our end of its input to see that we are there."""
    command = [
        sys.executable,
        "-m",
        "trainwright.estimator.measure.all_reduce",
        "--rank",
        str(rank),
        *order,
    ]
    with (
        (folder / f"errors.{rank}").open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


def save(link: Link, path: Path) -> None:
    """Write a link as JSON, at once or not at all. Raises BadInput where that can't be."""
    write_named(path, link.model_dump_json(indent=1).encode(), "link")


def _interface_of(address: str) -> str:
    try:
        return interface_of(address)
    except UnicodeError:
        raise BadInput(f"--address: got {address!r}; no such address or host name") from None
    except OSError as error:
        why = "no such address or host name" if isinstance(error, socket.gaierror) else error
        raise BadInput(f"--address: got {address!r}; {why}") from None


def _rounds(budget_s: float, seed: int) -> list[Sample]:
    draw, samples = random.Random(seed), list[Sample]()
    buffers = _buffers()
    repeats = dict.fromkeys(SIZES_BYTES, 0)
    for size in SIZES_BYTES:
        once_s = _sum_together(buffers, size, 1)
        repeats[size] = max(1, min(_MOST_REPEATS, round(_LEAST_S / once_s)))
    started, order, first = time.monotonic(), list(SIZES_BYTES), True
    while first or time.monotonic() - started < budget_s:
        draw.shuffle(order)
        for size in order:
            if not first and time.monotonic() - started > budget_s:
                break
            samples.append((size, _RANKS, _sum_together(buffers, size, repeats[size])))
        first = False
    _tell(0, 0)
    return samples


def _sum_together(buffers: dict[int, Any], size: int, repeats: int) -> float:
    """Mean seconds of an all-reduce of this size, after one that is not timed, from which both ranks start together."""
    _tell(size, repeats)
    return _sum(buffers[size], repeats)


def _sum(buffer: Any, repeats: int) -> float:
    import torch.distributed as dist

    dist.all_reduce(buffer)
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(buffer)
    return (time.perf_counter() - started) / repeats


def _tell(size: int, repeats: int) -> tuple[int, int]:
    """What rank 0 says is next; (0, 0) is the end."""
    import torch
    import torch.distributed as dist

    said = torch.tensor([size, repeats])
    dist.broadcast(said, 0)
    return int(said[0]), int(said[1])


def _buffers() -> dict[int, Any]:
    import torch

    whole = torch.zeros(SIZES_BYTES[-1] // _ELEMENT_BYTES)
    return {size: whole[: size // _ELEMENT_BYTES] for size in SIZES_BYTES}


def _take_part(rank: int, folder: Path, interface: str, budget_s: float, seed: int) -> None:
    """A rank: 0 says what is next and takes the times, the other does as it is told."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # ranks share this machine's cores
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group(
        "gloo",
        init_method=(folder / "meeting").as_uri(),
        rank=rank,
        world_size=_RANKS,
        timeout=timedelta(seconds=_MEET_S),
    )
    if rank == 0:
        (folder / "samples").write_text(json.dumps(_rounds(budget_s, seed)))
    else:
        buffers = _buffers()
        while (said := _tell(0, 0))[1]:
            _sum(buffers[said[0]], said[1])
    dist.destroy_process_group()


def _end_with_input() -> None:
    """The input ends when the process that holds its other end does, whatever ended it."""
    os.read(0, 1)  # unbuffered: the interpreter would wait for a buffer's lock when it ends
    os._exit(1)


def main() -> int:
    """Measure and write the file, or be a rank; errors are one line on stderr, with the exit code of their kind."""
    parser = argparse.ArgumentParser(
        description="Measures all-reduce between two ranks of this machine."
    )
    parser.add_argument("--out", type=Path, help="where the link is written, as JSON")
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="an address of this machine, over which the ranks speak",
    )
    parser.add_argument("--budget", type=float, default=5.0, help="seconds to measure")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    for name, kind in {"rank": int, "folder": Path, "interface": str}.items():
        parser.add_argument(
            f"--{name}", type=kind, help=argparse.SUPPRESS
        )  # what a rank is started with
    given = parser.parse_args()
    if given.rank is not None:
        _take_part(given.rank, given.folder, given.interface, given.budget, given.seed)
        return 0
    if given.out is None:
        parser.error("--out: missing")
    try:
        require_space(given.out, 1 << 12, "link")  # or nothing is measured
        save(measure_link(given.address, given.budget, given.seed), given.out)
    except TrainwrightError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
