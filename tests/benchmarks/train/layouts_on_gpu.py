"""Layouts whose ranks are on a CPU and on a GPU at once, against one process on a CPU.

    python tests/benchmarks/train/layouts_on_gpu.py [--devices cuda:0 cpu cuda:0] [--families]
        [--compositions]

Ranks are threads here, with real messages. Printed is the largest relative difference of parameters
and buffers after two epochs in fp64, for each layout with dropout, and with `--families` for twelve
models: with dense layers late-multiplied and sharded in turn, and cut into three stages of a
pipeline. With `--compositions`, also those of pipelines, factors and rows, whose ranks take the
devices in turn. Then the time of dropout whose masks belong to samples, beside torch's own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / room)
    for room in ("..", "", "train", "train/layouts", "train/pipeline", "train/rank")
)

import torch
from families import FAMILIES, HEAD, TAIL, source_of
from joint_batch_case import relative_difference
from layout_ranks import layers_of, structure_of, train_in_threads, whole_state, with_layout
from staged_case import with_stages
from test_compositions import COMPOSITIONS, MODEL, batch_sizes, composed
from test_exactness import LAYOUTS
from test_families import alternating
from torch.nn import functional
from training_case import alone, request

from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.passes import keyed_dropout
from trainwright.tasks.train.rank.rank import Rank


def state_of(rank: Rank) -> dict[str, torch.Tensor]:
    """The whole model, in host memory."""
    return {name: value.cpu().clone() for name, value in whole_state(rank)[0].items()}


def difference(
    folder: Path, asked: TrainRequest, divided: TrainRequest, devices: list[str]
) -> float:
    """The largest relative difference of any rank from one process."""
    found = train_in_threads(divided, folder / "store", state_of, devices=devices)
    expected = alone(asked)
    return max(relative_difference(one, expected) for one in found)


def wanted(folder: Path, sizes: Sequence[int] = (31, 20, 11), **more: Any) -> TrainRequest:
    """A training in fp64 whose last batch is smaller."""
    return request(
        folder,
        list(sizes),
        validation_fraction=1500 / 1797,
        epochs=2,
        precision="fp64",
        optimizer={"name": "adamw"},
        clip_norm=5.0,
        **more,
    )


def seconds(work: Callable[[], object], device: str) -> float:
    """The median time of some runs."""
    times = []
    for _ in range(12):
        started = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs=3, default=["cuda:0", "cpu", "cuda:0"])
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--compositions", action="store_true")
    asked_for = parser.parse_args()
    for layout, fields in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as name:
            asked = wanted(Path(name), model={"norm": True, "dropout": 0.4})
            off = difference(Path(name), asked, with_layout(asked, **fields), asked_for.devices)
        print(f"{layout:24} {off:.2e}", flush=True)
    for family in FAMILIES if asked_for.families else ():
        with tempfile.TemporaryDirectory() as name:
            asked = wanted(Path(name))
            (Path(asked.source_folder) / "net.py").write_text(source_of(family))
            divided = with_layout(asked, *alternating(layers_of(asked)))
            off = difference(Path(name), asked, divided, asked_for.devices)
        with tempfile.TemporaryDirectory() as name:
            asked = wanted(Path(name))
            (Path(asked.source_folder) / "net.py").write_text(source_of(family))
            units = structure_of(asked).units
            joint = any(one.batch_statistics for one in units)
            if len(units) < len(asked_for.devices):
                print(f"{family:24} {off:.2e}, has {len(units)} units", flush=True)
                continue
            sizes = [62] if joint else [16, 16, 16, 14]
            staged = with_stages(asked, [(sizes, [0.3, 0.7])], "zero-bubble")
            cut = difference(Path(name), asked, staged, asked_for.devices)
        print(f"{family:24} {off:.2e}, three stages {cut:.2e}", flush=True)
    for title, one in COMPOSITIONS.items() if asked_for.compositions else ():
        sizes = batch_sizes(one.pipelines)
        with tempfile.TemporaryDirectory() as name:
            asked = wanted(Path(name), sizes)
            (Path(asked.source_folder) / "net.py").write_text(HEAD + MODEL + TAIL)
            ranks = [*itertools.islice(itertools.cycle(asked_for.devices), len(sizes))]
            off = difference(Path(name), asked, composed(asked, one), ranks)
        print(f"{title:24} {off:.2e}", flush=True)
    keyed_dropout.install()
    for device in sorted({*asked_for.devices}):
        rows = torch.ones(8192, 4096, device=device)
        plain = seconds(lambda rows=rows: functional.dropout(rows, 0.1), device)  # type: ignore[misc]
        keyed_dropout.begin_pass(1, 1, 0, len(rows))
        keyed = seconds(lambda rows=rows: functional.dropout(rows, 0.1), device)  # type: ignore[misc]
        keyed_dropout.end_pass()
        print(f"dropout of 8192 × 4096, {device}: {1e3 * keyed:.1f} ms, torch {1e3 * plain:.1f} ms")


if __name__ == "__main__":
    main()
