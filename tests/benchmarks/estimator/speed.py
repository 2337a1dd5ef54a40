"""The speed of extraction and estimates: `python tests/benchmarks/estimator/speed.py …`.

`trainwright extract` extracts a transformer of a billion parameters and ResNet-50 at 224 px at
batch 32. Their structures, and that of LSTM cells with many small operations, are then estimated on
a calibrated CPU (--calibration FILE from `trainwright calibrate`; without it, this machine's
calibration is used, or measured) and on a GPU by its datasheet. Each figure comes from 5 separate
processes in random order: median, lowest and highest seconds, the median of CPU seconds (which
other programs affect less), the peak memory of any of its processes, and whether torch was loaded.
The noise floor is a fixed loop of Python in separate processes among them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.estimator.predict.calibration import save
from trainwright.tasks.estimate.calibrate import calibration_for
from trainwright.tasks.settings import Settings

TRANSFORMER = """
import torch
from torch import nn
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50_000, 1536)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(1536, 16, 6144, batch_first=True) for _ in range(32))
        self.head = nn.Linear(1536, 50_000)
    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)
def build_model(): return Decoder()
def example_batch(n):
    return torch.zeros(n, 512, dtype=torch.long), torch.zeros(n * 512, dtype=torch.long)
"""
RESNET = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width))
        same = stride == 1 and inputs == 4 * width
        self.short = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
    def forward(self, x): return torch.relu(self.body(x) + self.short(x))
def build_model():
    inputs, made = 64, [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    made.append(nn.MaxPool2d(3, 2, 1))
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            made.append(Block(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*made, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
def example_batch(n): return torch.rand(n, 3, 224, 224), torch.zeros(n, dtype=torch.long)
"""
CELLS = """
import torch
from torch import nn
class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [(128 + 8 * number, 136 + 8 * number) for number in range(4)]
        self.cells = nn.ModuleList(nn.LSTMCell(inputs, hidden) for inputs, hidden in sizes)
        self.head = nn.Linear(160, 10)
    def forward(self, x):
        states = [None] * 4
        for step in x.unbind(1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(step, states[number])
                step = states[number][0]
        return self.head(step)
def build_model(): return Cells()
def example_batch(n): return torch.rand(n, 60, 128), torch.zeros(n, dtype=torch.long)
"""
ESTIMATE = """
import json, sys, time
from pathlib import Path
import numpy, scipy.optimize  # as a process has that has predicted once
from trainwright.estimator.predict.calibration import load
from trainwright.estimator.predict.step_time import estimate_step, predict_curve
from trainwright.estimator.structure import Structure
path, device_type, calibration, what = sys.argv[1:]
structure = Structure.model_validate_json(Path(path).read_bytes())
known = load(Path(calibration)) if device_type == "cpu" else None
started, worked = time.perf_counter(), time.thread_time()
if what == "step":
    estimate_step(predict_curve(structure, known, device_type=device_type, batch_size=64), 64)
else:
    predict_curve(structure, known, device_type=device_type)
print(json.dumps({
    "seconds": time.perf_counter() - started,
    "cpu_s": time.thread_time() - worked,
    "torch": "torch" in sys.modules,
}))
"""
NOISE = """
import json, time
started, worked = time.perf_counter(), time.thread_time()
sum(number * number for number in range(300_000))
seconds, cpu_s = time.perf_counter() - started, time.thread_time() - worked
print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "torch": False}))
"""


@dataclass(frozen=True)
class Case:
    """A case to time, and its limits."""

    name: str
    command: Sequence[str]
    limit_s: float | None = None
    limit_bytes: float | None = None


@dataclass(frozen=True)
class Seen:
    """One process: wall-clock and CPU seconds, peak memory with children, whether torch loaded."""

    seconds: float
    cpu_s: float
    most_bytes: float
    torch: bool | None


def run(case: Case) -> Seen:
    """Run a case; its reported seconds, else those of the whole process."""
    started = time.perf_counter()
    with (
        tempfile.TemporaryFile() as answer,
        subprocess.Popen([sys.executable, *case.command], stdout=answer) as process,
    ):
        _, status, used = os.wait4(process.pid, 0)
        took = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"{case.name}: ended with {process.returncode}")
        answer.seek(0)
        reported = json.loads(answer.read())
    worked = reported.get("cpu_s", used.ru_utime + used.ru_stime)
    return Seen(reported.get("seconds", took), worked, used.ru_maxrss * 1024, reported.get("torch"))


def main() -> None:
    """Time every case in random order, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--calibration", type=Path, help="default: this machine's, measured if none is cached"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        calibration = given.calibration or Path(name) / "cpu.json"
        if given.calibration is None:
            save(calibration_for(1, Settings.from_environment()), calibration)
        models = {"transformer": TRANSFORMER, "resnet": RESNET, "cells": CELLS}
        sources = {model: Path(name) / f"{model}.py" for model in models}
        structures = {model: Path(name) / f"{model}.json" for model in models}
        extract = ["-m", "trainwright.tasks.cli.main", "extract", "--json", "--batch-size", "32"]
        for model, code in models.items():
            sources[model].write_text(code)
            with structures[model].open("wb") as file:
                subprocess.run(
                    [sys.executable, *extract, str(sources[model])], stdout=file, check=True
                )
        cases = [
            Case(
                "extract, transformer of 1.0 G", [*extract, str(sources["transformer"])], 60.0, 1e9
            ),
            Case("extract, ResNet-50 224 px", [*extract, str(sources["resnet"])], 10.0, 1e9),
            Case("noise floor: a loop of Python", ["-c", NOISE]),
        ]
        for model, structure in structures.items():
            for device_type in ("cpu", "nvidia-a100-80gb"):
                for what, limit_s in (("step", 0.05), ("curve", 0.5)):
                    command = ["-c", ESTIMATE, str(structure), device_type, str(calibration), what]
                    cases.append(Case(f"{what}, {model}, {device_type}", command, limit_s))
        seen: dict[str, list[Seen]] = {case.name: [] for case in cases}
        drawn = random.Random(given.seed)
        for _ in range(given.rounds):
            for case in drawn.sample(cases, len(cases)):
                seen[case.name].append(run(case))
    print(
        f"{'':36}{'median':>10}{'low':>10}{'high':>10}{'CPU':>10}{'limit':>8}{'memory':>10}"
        "  torch loaded"
    )
    for case in cases:
        seconds = [one.seconds for one in seen[case.name]]
        cpu = statistics.median(one.cpu_s for one in seen[case.name])
        figures = "".join(
            f"{value:>8.3f} s"
            for value in (statistics.median(seconds), min(seconds), max(seconds), cpu)
        )
        limit = f"{case.limit_s:g} s" if case.limit_s else "-"
        memory = max(one.most_bytes for one in seen[case.name]) / 1e6
        torch = {one.torch for one in seen[case.name]}
        loaded = "in its child" if torch == {None} else "yes" if True in torch else "no"
        missed = "  MISSED" if case.limit_s and statistics.median(seconds) > case.limit_s else ""
        missed += "  MISSED memory" if case.limit_bytes and memory * 1e6 > case.limit_bytes else ""
        print(f"{case.name:36}{figures}{limit:>8}{memory:>7.0f} MB  {loaded}{missed}")


if __name__ == "__main__":
    main()
