"""Sums of gradients on the GPUs of this machine, by NCCL, beside sums in host memory.

    python tests/benchmarks/train/device_sums.py [--megabytes 256] [--chunk 4] [--rounds 20]

One rank on each GPU; with one GPU, NCCL has a group of one. Gradients of a chain of layers are
summed as in a training, while the backward pass goes on. It fails unless the sums are right and
nothing but single numbers is copied to host memory. Printed is the time of a backward pass with
its sums: on the GPUs, and by host memory.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainwright.tasks.train.exchange.collective import TorchCollective
from trainwright.tasks.train.exchange.device_sums import DeviceSums, has_nccl
from trainwright.tasks.train.layouts.gradients import GradientSum

WIDTH = 2048


class OnDevices:
    """Sums on the GPUs."""

    wait_s = 0.0

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self.sums = rank, size, DeviceSums(rank, size, store, 60.0)

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        return self.sums.begin(tensor, "started")

    def finish(self, handle: Any) -> None:
        handle()


def passes(layers: torch.nn.Module, gradients: GradientSum, rows: torch.Tensor) -> None:
    gradients.begin()
    (layers(rows).sum() / len(rows)).backward()
    gradients.send_rest()
    gradients.finish([1.0] * len(gradients.used))
    torch.cuda.synchronize()


def copied_bytes(work: Any) -> int:
    """The bytes that `work` copies from the GPU to host memory."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        import json

        events = json.loads(path.read_text())["traceEvents"]
    return sum(one["args"].get("bytes", 0) for one in events if "DtoH" in str(one.get("name", "")))


def rank(number: int, size: int, folder: Path, asked: argparse.Namespace) -> None:
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    store = torch.distributed.FileStore(str(folder / "devices"), size)
    layers = max(1, round(asked.megabytes * 1e6 / 4 / WIDTH**2))
    found: dict[str, list[float]] = {}
    results = {}
    for name in ("on the GPUs", "by host memory"):
        here = name == "on the GPUs"
        exchange: Any = (
            OnDevices(number, size, store)
            if here
            else TorchCollective(number, size, str(folder / "host"))
        )
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        ).to(device)
        where = device if here else None
        gradients = GradientSum(model.parameters(), exchange, round(asked.chunk * 1e6), where)
        rows = torch.randn(256, WIDTH, device=device) + number
        step = partial(passes, model, gradients, rows)
        for _ in range(3):
            step()
        times = []
        for _ in range(asked.rounds):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        found[name] = times
        results[name] = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        if here:
            copied = copied_bytes(step)
            assert copied < 1024, f"{copied} bytes were copied to host memory"
            exchange.sums.abort()
    for one, other in zip(*results.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if number == 0:
        print(f"{size} x {torch.cuda.get_device_name()}, {asked.megabytes} MB of gradients")
        for name, times in found.items():
            low, median, high = (
                1e3 * figure for figure in (min(times), statistics.median(times), max(times))
            )
            print(f"{name:15} {median:8.1f} ms  ({low:.1f} to {high:.1f})")
        print(f"copied to host memory with sums on the GPUs: {copied} bytes a step")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=256, help="of gradients")
    parser.add_argument("--chunk", type=float, default=4, help="megabytes of a chunk")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not has_nccl():
        sys.exit("torch finds no GPU with NCCL on this machine")
    size = torch.cuda.device_count()
    if asked.rank is not None:
        rank(asked.rank, size, asked.folder, asked)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--rank"]
        ranks = [subprocess.Popen([*command, str(number)]) for number in range(size)]
        return max(one.wait() for one in ranks)


if __name__ == "__main__":
    sys.exit(main())
