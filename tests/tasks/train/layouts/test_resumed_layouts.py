"""A checkpoint that ranks of one layout wrote is read by other ranks of another, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from group_changes import ThreadRank, ThreadRanks
from joint_batch_case import BOUNDS, largest_difference
from layout_ranks import whole_state, with_layout
from safetensors.torch import load_file, save_file
from staged_case import with_dense, with_stages
from training_case import NO_SPARE, alone, request, when_checkpoint

from trainwright.tasks.errors import Interrupted
from trainwright.tasks.train import TrainRequest, train
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.checkpoint.fence import STATE

MODEL = """
import torch

def build_model():
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32, bias=False),  # its gradient would be noise
        torch.nn.BatchNorm1d(32), torch.nn.ReLU(),
        torch.nn.Linear(32, 24), torch.nn.ReLU(), torch.nn.Linear(24, 10),
    )
"""
ROWS = {"1": 32, "4": 24, "6": 10}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data-parallel": {"sync": {}},
    "late-multiply": {"sync": dict.fromkeys(ROWS, "factors")},
    "sharded": {"sync": dict.fromkeys(ROWS, "rows")},
    "hybrid": {"sync": {"1": "rows", "4": "factors"}},
    "averaging": {"sync": {}, "average_every": 4, "outer": "nesterov"},
    "mixed": {"sync": {"1": "average", "4": "rows"}, "average_every": 3, "outer": "nesterov"},
    "pipeline": {"sync": {}},
    "pipelines": {"sync": {}},
    "pipelines with rows and factors": {"sync": {}},
}
STAGES: dict[int, list[tuple[list[int], list[float]]]] = {
    1: [([60], [])],
    2: [([60], [0.5])],
    3: [([60], [0.3, 0.7])],
}
REPLICAS: dict[int, list[tuple[list[int], list[float]]]] = {
    3: [([35], [0.5]), ([25], [])],
    4: [([35], [0.3]), ([25], [0.7])],
}
BATCHES = {3: [30, 20, 10], 2: [35, 25], 4: [20, 20, 15, 5], 1: [60]}


def asked_for(folder: Path, layout: str, ranks: int, **spec: Any) -> TrainRequest:
    """24 steps of 60 samples, on so many ranks of a layout; the last rank has few rows or none."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = request(
        folder,
        BATCHES[ranks],
        validation_fraction=1077 / 1797,
        epochs=2,
        optimizer={"name": "adamw", "weight_decay": 0.1},
        **spec,
    )
    (folder / "source" / "net.py").write_text(MODEL)
    if layout == "pipeline":
        return with_stages(asked, STAGES[ranks])  # one micro-batch: it has a batch norm
    if layout in ("pipelines", "pipelines with rows and factors"):
        staged = with_stages(asked, REPLICAS[ranks])
        return staged if layout == "pipelines" else with_dense(staged, ["rows", "factors"])
    fields = dict(LAYOUTS[layout])
    syncs = fields.pop("sync")
    cut = {layer: total for layer, total in ROWS.items() if syncs.get(layer) == "rows"}
    rows = {layer: [total - 3 * (ranks - 1), *[3] * (ranks - 1)] for layer, total in cut.items()}
    for counts in rows.values():
        if ranks > 2:
            counts[0], counts[-1] = counts[0] + counts[-1], 0
    return with_layout(asked, syncs, rows, **fields)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By layout: the folder of a checkpoint that its ranks wrote after seven steps."""
    found = {}
    for layout in LAYOUTS:
        folder = tmp_path_factory.mktemp(layout)
        ranks = ThreadRanks(asked_for(folder, layout, 4 if layout == "pipelines" else 3), folder)
        ranks.group(*range(len(ranks.all)))
        ranks.steps(7)
        first = ranks.each(state_of)[0]
        found[layout] = folder / "checkpoint"
        write(found[layout], ranks.all[0], *first)
        ranks.each(lambda one: one.out())
    return found


def state_of(one: ThreadRank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a checkpoint holds, as `Training` makes it."""
    one.rank.average(moments=True)
    one.rank.take_state_from_first()
    return whole_state(one.rank)


def write(folder: Path, one: ThreadRank, model: Any, optimizer: Any) -> None:
    folder.mkdir()
    state = one.training.state
    assert state is not None
    for name, tensors in ((files.MODEL, model), (files.OPTIMIZER, optimizer)):
        save_file(
            {key: value.clone().contiguous() for key, value in tensors.items()}, folder / name
        )
        state.add_file(name, (folder / name).read_bytes())
    state.split, state.adaptive = list(one.rank.split), one.training.batch.document()
    (folder / STATE).write_bytes(state.encoded())


READERS = [
    ("data-parallel", 4),
    ("late-multiply", 2),
    ("sharded", 1),
    ("sharded", 4),
    ("hybrid", 2),
    ("averaging", 1),
    ("mixed", 4),
    ("pipeline", 1),
    ("pipeline", 2),
    ("pipelines", 3),
    ("pipelines with rows and factors", 4),
]
"""Each reads what ranks of every layout wrote."""


@pytest.fixture(params=READERS, ids=str)
def readers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ThreadRanks]:
    layout, count = request.param
    ranks = ThreadRanks(asked_for(tmp_path, layout, count), tmp_path)
    yield ranks
    ranks.each(lambda one: one.out())


def test_other_ranks_of_another_layout_have_the_same_state(
    written: dict[str, Path], readers: ThreadRanks
) -> None:
    for layout, folder in written.items():
        for one in readers.all:
            one.out()
            one.training.state = None  # as in a new process
        readers.group(*range(len(readers.all)), checkpoint=folder)
        model, optimizer = (load_file(folder / one) for one in (files.MODEL, files.OPTIMIZER))
        averages = readers.all[0].rank.averaging is not None
        for own_model, own_optimizer in readers.each(lambda one: whole_state(one.rank)):
            assert_equal(own_model, model, layout)
            kept = {
                name: one
                for name, one in optimizer.items()
                if averages or not name.startswith("velocity.")
            }
            assert_equal(own_optimizer, kept, layout)
        assert readers.each(lambda one: one.training.finished) == [7] * len(readers.all)
    readers.steps(9)


def assert_equal(
    own: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], layout: str
) -> None:
    assert own.keys() == expected.keys(), layout
    for name, one in expected.items():
        assert own[name].dtype == one.dtype, (layout, name)
        assert torch.equal(own[name].cpu(), one), (layout, name)


@pytest.mark.slow
def test_real_ranks_go_on_in_another_layout_as_if_they_had_not_stopped(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    first, second = "sharded", "hybrid"

    def named(asked: TrainRequest, name: str) -> TrainRequest:
        layout = asked.layout.model_copy(update={"name": name})
        return asked.model_copy(update={"plan": asked.plan.model_copy(update={"layout": layout})})

    spec: dict[str, Any] = {"precision": "fp64", "backend": "torch", **NO_SPARE}
    stop = threading.Event()
    stopped = when_checkpoint(tmp_path, 5, stop.set)
    slow = [{"type": "emulated", "speed": 0.3}] * 2
    with pytest.raises(Interrupted, match="stopped after step"):
        train(named(asked_for(tmp_path, first, 2, devices=slow, **spec), first), stop=stop)
    stopped.join()
    asked = named(asked_for(tmp_path, second, 4, **spec), second)
    result = train(asked)
    assert result.resumed_from_step is not None
    assert 5 <= result.resumed_from_step < 24
    (notice,) = [one["message"] for one in heard if "training continues" in one.get("message", "")]
    assert notice.endswith(f", in the layout {second} instead of {first}")
    (event,) = result.split_events
    assert event.reason.startswith("another plan; ")
    assert event.batch_sizes == BATCHES[4]
    expected = alone(asked)
    assert largest_difference(tmp_path / "run", result.steps, expected) <= BOUNDS["fp64"]
