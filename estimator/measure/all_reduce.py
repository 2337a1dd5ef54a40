"""Measures all-reduce between two ranks of this machine, each a process that loads torch.

`python -m trainwright.estimator.measure.all_reduce --out FILE [--address 127.0.0.1] [--budget 5]`

The process that starts them loads no torch. The ranks find each other through a file and use Gloo
over the interface that has the address. Sizes come in random order in each round; a sample is the
mean over some all-reduces. `communication.fit_link` fits the link to all samples. At the end the
ranks measure how much longer a training step takes after a sum (`step_after_sum`).
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
from trainwright.estimator.measure.step_after_sum import measure_after_sum
from trainwright.estimator.named_file import require_space, write_named
from trainwright.estimator.predict.communication import Link, fit_link

LEAST_BUDGET_S, MOST_BUDGET_S = 0.2, 60.0
SIZES_BYTES = tuple(1 << power for power in range(10, 26))  # 1 KiB to 32 MiB
_RANKS = 2
# For loading torch and connecting on a busy machine. A rank that exits is noticed at once.
_MEET_S = 180.0
_LEAST_S = 3e-3  # of all-reduces in one sample
_MOST_REPEATS = 50
_ELEMENT_BYTES = 4
_POLL_S = 0.02
Sample = tuple[float, int, float]


def measure_link(address: str = "127.0.0.1", budget_s: float = 5.0, seed: int = 0) -> Link:
    """The link between two ranks of this machine, measured for `budget_s` seconds.

    The budget does not include loading torch, and at least one round over all sizes is measured.
    Raises BadInput for an address that is not this machine's or a budget out of bounds, BusyMachine
    if the ranks do not connect in time, and TrainwrightError if one fails.
    """
    samples, after_sum_s = measure_samples(address, budget_s, seed)
    return fit_link(samples).model_copy(update={"after_sum_s": after_sum_s})


def measure_samples(
    address: str = "127.0.0.1", budget_s: float = 5.0, seed: int = 0
) -> tuple[list[Sample], float]:
    """The samples for `measure_link`, in order, as (bytes, ranks, seconds); and `after_sum_s`.

    Raises the same errors.
    """
    if not LEAST_BUDGET_S <= budget_s <= MOST_BUDGET_S:
        raise BadInput(
            f"--budget: got {budget_s:g}; allowed: {LEAST_BUDGET_S:g} to {MOST_BUDGET_S:g} s"
        )
    interface = _interface_of(address)
    with tempfile.TemporaryDirectory(prefix="trainwright-link-") as name, ExitStack() as ranks:
        folder = Path(name)
        options = ["--folder", name, "--interface", interface]
        options += ["--budget", str(budget_s), "--seed", str(seed)]
        processes = [ranks.enter_context(_running(rank, options, folder)) for rank in range(_RANKS)]
        deadline = time.monotonic() + _MEET_S + 2 * budget_s
        while processes[0].poll() != 0:  # rank 0 has written the samples when it ends
            for rank, process in enumerate(processes):
                if process.poll():
                    raise TrainwrightError(
                        f"link: rank {rank} exited with {process.returncode}: "
                        f"{_last_line(folder / f'errors.{rank}')}"
                    )
            if time.monotonic() > deadline:
                raise BusyMachine(
                    f"link: no result after {_MEET_S + 2 * budget_s:.0f} s over {address} "
                    f"({interface}): the machine is too busy; measure it when it is idle"
                )
            time.sleep(_POLL_S)
        found = json.loads((folder / "samples").read_text())
        samples = [(size, count, seconds) for size, count, seconds in found["sums"]]
        return samples, found["after_sum_s"]


@contextmanager
def _running(rank: int, options: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A rank, which is killed at the end of the block.

    It also ends when its standard input does: this process holds the other end.
    """
    command = [sys.executable, "-m", "trainwright.estimator.measure.all_reduce"]
    command += ["--rank", str(rank), *options]
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
    return lines[-1][:300] if lines else "it reported no error"


def save(link: Link, path: Path) -> None:
    """Write a link as JSON, atomically. Raises BadInput if that fails."""
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
    _announce(0, 0)
    return samples


def _sum_together(buffers: dict[int, Any], size: int, repeats: int) -> float:
    """Mean seconds of an all-reduce of this size.

    The first one is not timed, so that both ranks start together.
    """
    _announce(size, repeats)
    return _sum(buffers[size], repeats)


def _sum(buffer: Any, repeats: int) -> float:
    import torch.distributed as dist

    dist.all_reduce(buffer)
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(buffer)
    return (time.perf_counter() - started) / repeats


def _announce(size: int, repeats: int) -> tuple[int, int]:
    """The next size and count, which rank 0 announces; (0, 0) is the end.

    Only rank 0's arguments count.
    """
    import torch
    import torch.distributed as dist

    following = torch.tensor([size, repeats])
    dist.broadcast(following, 0)
    return int(following[0]), int(following[1])


def _buffers() -> dict[int, Any]:
    import torch

    whole = torch.zeros(SIZES_BYTES[-1] // _ELEMENT_BYTES)
    return {size: whole[: size // _ELEMENT_BYTES] for size in SIZES_BYTES}


def _be_rank(rank: int, folder: Path, interface: str, budget_s: float, seed: int) -> None:
    """Run a rank: rank 0 announces each measurement and times it, the other takes part."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # ranks share this machine's cores
    os.environ["GLOO_SOCKET_IFNAME"] = interface  # Gloo reads it only from the environment
    dist.init_process_group(
        "gloo",
        init_method=(folder / "meeting").as_uri(),
        rank=rank,
        world_size=_RANKS,
        timeout=timedelta(seconds=_MEET_S),
    )
    if rank == 0:
        found: dict[str, Any] = {"sums": _rounds(budget_s, seed)}
    else:
        buffers = _buffers()
        while (following := _announce(0, 0))[1]:
            _sum(buffers[following[0]], following[1])
    after_sum_s = measure_after_sum(rank)
    if rank == 0:
        (folder / "samples").write_text(json.dumps(found | {"after_sum_s": after_sum_s}))
    dist.destroy_process_group()


def _end_with_input() -> None:
    """Exit when the process at the other end of standard input ends, for whatever reason."""
    os.read(0, 1)  # unbuffered: a buffer's lock would delay the interpreter's exit
    os._exit(1)


def main() -> int:
    """Measure and write the file, or run a rank.

    An error is one line on stderr and an exit code.
    """
    parser = argparse.ArgumentParser(
        description="Measures all-reduce between two ranks of this machine."
    )
    parser.add_argument("--out", type=Path, help="where the link is written, as JSON")
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="an address of this machine, over which the ranks communicate",
    )
    parser.add_argument("--budget", type=float, default=5.0, help="seconds to measure")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    for name, kind in {"rank": int, "folder": Path, "interface": str}.items():  # of a rank
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        _be_rank(given.rank, given.folder, given.interface, given.budget, given.seed)
        return 0
    if given.out is None:
        parser.error("--out: missing")
    try:
        require_space(given.out, 1 << 12, "link")  # before anything is measured
        save(measure_link(given.address, given.budget, given.seed), given.out)
    except TrainwrightError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
