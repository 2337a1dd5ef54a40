"""Measures what passes and messages of a pipeline cost ranks of this machine.

Run it with `python -m trainwright.tasks.train.worker.measure_passes --out FILE`. Two ranks, each
a process, train a small model in two stages, with few and with many micro-batches in turn, and send
messages to and fro. What a micro-batch more takes, less its layers and messages, are two passes
(`estimator.predict.pass_cost`). They train it as emulated devices too, which follow their layers.
The measure is the processes' CPU time, which other load on the machine does not change; that of a
message's delay is the time that passes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np  # noqa: TID253 - this is a process of its own
import torch  # noqa: TID253

from trainwright.estimator.curves import Affine, LayerCost
from trainwright.estimator.devices import EMULATED
from trainwright.estimator.predict.pass_cost import PassCost
from trainwright.estimator.trace import source as model_source
from trainwright.infra.process import dying_with_parent
from trainwright.tasks.data import dataset as data
from trainwright.tasks.errors import TrainwrightError
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage
from trainwright.tasks.train.exchange.peers import Peers
from trainwright.tasks.train.rank.rank import Rank
from trainwright.tasks.train.request import TrainRequest
from trainwright.tasks.train.worker.measured_request import measured_job, measured_request
from trainwright.tasks.train.worker_group import WorkerGroup

_SAMPLES, _WIDTH, _DEEP = 4, 16, 6
"""of a micro-batch; of the layers; layers of a stage"""
_FEW, _MANY = 2, 18
"""micro-batches"""
_LARGE_BYTES = 4 << 20
_MESSAGES, _LARGE_MESSAGES = 50, 4
"""in a row"""
_LEAST_ROUNDS = 5
_LEAVE_S = 60.0
_FAST = 1e9
"""a speed at which emulated devices never sleep"""
_SOURCE = """
from torch import nn


class Stages(nn.Module):
    def __init__(self, width, deep):
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(width, width) for _ in range(deep)))
        self.second = nn.Sequential(*(nn.Linear(width, width) for _ in range(deep)))

    def forward(self, inputs):
        return self.second(self.first(inputs))


def build_model(width, deep):
    return Stages(width, deep)
"""


def measure_passes(budget_s: float, folder: Path) -> PassCost:
    """The cost, between this process and another that it starts; `folder` takes what they share.

    Raises TrainwrightError if the other process fails.
    """
    prepare(folder)
    command = [sys.executable, "-m", __spec__.name, "--folder", str(folder)]
    errors = folder / "errors"
    with errors.open("wb") as written:
        other = subprocess.Popen(
            dying_with_parent(command), stdin=subprocess.DEVNULL, stdout=written, stderr=written
        )
    try:
        found = _Probe(folder, 0).measured(budget_s)
        if other.wait(_LEAVE_S) != 0:
            lines = errors.read_text(errors="replace").strip().splitlines()
            raise TrainwrightError(f"passes: the other rank failed: {(lines or [''])[-1][:300]}")
        return found
    finally:
        other.kill()
        other.wait()


def prepare(folder: Path) -> None:
    """Write the model and the data."""
    (folder / "model.py").write_text(_SOURCE)
    draw = np.random.default_rng(0)
    rows = _MANY * _SAMPLES * 2
    inputs = draw.random((rows, _WIDTH), dtype=np.float32)
    np.savez(folder / "rows.npz", inputs=inputs, label=draw.integers(0, _WIDTH, rows))


class _Probe:
    """One of the two ranks."""

    def __init__(self, folder: Path, number: int) -> None:
        torch.set_num_threads(1)
        self._number = number
        self._peers = Peers("torch")
        group = WorkerGroup(
            generation=1,
            members=[0, 1],
            rendezvous=str(folder / "sums"),
            transfers=str(folder / "transfers"),
        )
        self._peers.join(group, number)
        self._steps = [
            self._training(folder, parts, speed)
            for parts, speed in ((_FEW, None), (_MANY, None), (_MANY, _FAST))
        ]
        definition = model_source.load(folder, "model.py")
        self._model = model_source.build(definition, {"width": _WIDTH, "deep": _DEEP})
        self._rows = torch.rand(_SAMPLES, _WIDTH)
        self._classes = torch.zeros(_SAMPLES, dtype=torch.long)

    def _training(self, folder: Path, parts: int, speed: float | None) -> Callable[[], object]:
        """A step with so many micro-batches, on emulated devices of this speed if there is one."""
        asked = request(folder, parts, speed)
        dataset = data.load(asked.job.data, asked.job.train.seed)
        rank = Rank(asked, dataset, self._peers, torch.device("cpu"), self._number)
        rank.begin_anew([0, 1])
        rank.cut([0, 1])
        order = rank.epoch_order(0)

        def step() -> None:
            rank.step(order, 0, 0)
            rank.update(1e-3)

        return step

    def measured(self, budget_s: float) -> PassCost:
        """The medians over rounds. Both ranks call it at once; the first one's budget counts."""
        begun, rounds = time.monotonic(), list[list[float]]()
        going = True
        while going:
            rounds.append(self._round())
            more = len(rounds) < _LEAST_ROUNDS or time.monotonic() - begun < budget_s
            going = bool(self._of_first(float(more)))
        self._peers.shutdown()
        few, many, followed, alone, small, delay, large = (
            statistics.median(column) for column in zip(*rounds, strict=True)
        )
        own_s = (many - few) / (_MANY - _FEW) - alone / 2 - 2 * small
        layers = 2 * _DEEP
        """passes of a layer of a stage for each micro-batch"""
        return PassCost(
            pass_s=max(0.0, own_s / 2),
            message_s=small,
            byte_s=max(0.0, (large - small) / _LARGE_BYTES),
            delay_s=max(0.0, delay - 2 * small),
            layer_s=alone / (2 * layers) + max(0.0, (followed - many) / (_MANY * layers)),
            measured=True,
        )

    def _of_first(self, value: float) -> float:
        sent = torch.tensor([value if self._number == 0 else 0.0])
        return float(self._peers.sum_(sent, "value"))

    def _round(self) -> list[float]:
        """CPU seconds of steps, of a micro-batch's layers, of messages; seconds of a message."""
        steps = [_cpu_s(step) for step in self._steps]
        small = torch.zeros(_SAMPLES, _WIDTH)
        large = torch.zeros(_LARGE_BYTES // 4)
        small_s, delay_s = self._messages(small, _MESSAGES)
        large_s, _ = self._messages(large, _LARGE_MESSAGES)
        return [*steps, _cpu_s(self._alone) / _MANY, small_s, delay_s, large_s]

    def _alone(self) -> None:
        """A micro-batch's passes through the layers of both stages, without a pipeline."""
        for _ in range(_MANY):
            outputs = self._model(self._rows)
            torch.nn.functional.cross_entropy(outputs, self._classes).backward()

    def _messages(self, tensor: torch.Tensor, count: int) -> tuple[float, float]:
        """CPU seconds of a message on one end, and its seconds from one rank to the other."""
        exchange, first = self._peers, self._number == 0
        exchange.sum_(torch.zeros(1), "together")
        started, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            if first:
                sent = exchange.start_send([tensor], 1, "probe")
                exchange.receive(1, "probe")
            else:
                exchange.receive(0, "probe")
                sent = exchange.start_send([tensor], 0, "probe")
            exchange.finish(sent)
        ends = 2 * count
        return (time.process_time() - cpu_s) / ends, (time.perf_counter() - started) / ends


def _cpu_s(work: Callable[[], object]) -> float:
    work()
    started = time.process_time()
    work()
    return time.process_time() - started


def request(folder: Path, parts: int, speed: float | None) -> TrainRequest:
    """The training of the model in two stages, with so many micro-batches."""
    samples = parts * _SAMPLES
    config = {"width": _WIDTH, "deep": _DEEP}
    job = measured_job(folder / "rows.npz", folder / "model.py", config, samples)
    kind = {} if speed is None else {"type": EMULATED, "speed": speed, "cores": None}
    devices = [{"id": f"rank-{number}", **kind} for number in range(2)]
    stages = [
        Stage(device=str(one["id"]), layers=[name])
        for one, name in zip(devices, ("first", "second"), strict=True)
    ]
    return measured_request(
        job,
        data.load(job.data).schema,
        folder / f"work {parts} {speed}",
        devices,
        layout=Layout(
            name="pipeline",
            pipelines=[Pipeline(micro_batches=[_SAMPLES] * parts, stages=stages)],
        ),
        emulated_layers=_costs() if speed is not None else [],
    )


def _costs() -> list[LayerCost]:
    line = Affine(fixed=0.0, per_sample=1.0)
    return [
        LayerCost(name=f"{name}.{at}", forward=line, input_gradient=line, weight_gradient=line)
        for name in ("first", "second")
        for at in range(_DEEP)
    ]


def main() -> int:
    """Measure, and write the cost as JSON; with a folder, be the other rank."""
    parser = argparse.ArgumentParser(
        description="Measures what passes and messages of a pipeline cost ranks here."
    )
    parser.add_argument("--out", type=Path, help="where to write the cost")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds to measure")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        _Probe(given.folder, 1).measured(0.0)
    else:
        with tempfile.TemporaryDirectory(prefix="trainwright-passes-") as name:
            given.out.write_text(measure_passes(given.budget, Path(name)).model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
