"""Real ranks of a layout run out of memory, diverge or hang: the training goes on and ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from layout_ranks import with_layout
from training_case import SLOW, alone, pids, request, rows, when_checkpoint

from trainwright.tasks.allocate.replan.next_layout import NextLayout
from trainwright.tasks.errors import Interrupted, TrainingFailed
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage
from trainwright.tasks.spec.pool import Device
from trainwright.tasks.train import TrainRequest, train

FAULTY = """
import os, pathlib, torch

class Net(torch.nn.Module):
    def __init__(self, what, mark):
        super().__init__()
        self.what, self.mark = what, pathlib.Path(mark)
        self.hidden, self.out, self.calls = torch.nn.Linear(64, 32), torch.nn.Linear(32, 10), 0

    def forward(self, images):
        scores = self.out(torch.relu(self.hidden(images.flatten(1))))
        self.calls += self.training
        if self.training and self.calls > 7:
            if self.what == "memory" and len(images) > 37:
                raise MemoryError
            if self.what == "nan" and not self.mark.exists():
                self.mark.touch()
                return scores * float("nan")
        return scores

def build_model(what, mark):
    net = Net(what, mark)
    if what == "rows" and os.environ.get("HOROVOD_RANK") == "1":
        not_finite_once(net)
    if what in ("late_multiply", "sharded") and os.environ.get("HOROVOD_RANK") == "0":
        out_of_memory_once(net, what)
    return net

def not_finite_once(net):
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def spoil(optimizer, *_):
        if net.calls == 10 and not net.mark.exists():
            net.mark.touch()
            with torch.no_grad():
                net.hidden.weight[0, 0] = float("nan")

    register_optimizer_step_post_hook(spoil)

def out_of_memory_once(net, name):
    import importlib

    layers = importlib.import_module(f"trainwright.tasks.train.layouts.{name}")
    multiply = layers.multiply

    def fails(*factors):
        if net.calls == 8 and not net.mark.exists():
            net.mark.touch()
            raise MemoryError
        return multiply(*factors)

    layers.multiply = fails
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "late-multiply": {"sync": {"hidden": "factors", "out": "factors"}},
    "sharded": {
        "sync": {"hidden": "rows", "out": "rows"},
        "rows": {"hidden": [20, 12], "out": [6, 4]},
    },
}


def faulty(folder: Path, what: str, layout: str, **train_spec: Any) -> TrainRequest:
    """24 steps of a model with this fault in its eighth step, on two ranks of this layout."""
    folder.mkdir(exist_ok=True)
    asked = request(
        folder,
        [50, 10],
        model={"what": what, "mark": str(folder / "mark")},
        validation_fraction=1077 / 1797,
        epochs=2,
        backend="torch",
        **train_spec,
    )
    (folder / "source" / "net.py").write_text(FAULTY)
    return with_layout(asked, **LAYOUTS[layout])


def loss_alone(asked: TrainRequest) -> float:
    """The loss on the held-out rows after an undisturbed training."""
    metrics: list[dict[str, float]] = []
    alone(asked, parts=[30, 30], metrics=metrics)
    return metrics[-1]["loss"]


def test_a_rank_out_of_memory_gets_a_smaller_batch_and_no_step_is_lost(tmp_path: Path) -> None:
    asked = faulty(tmp_path, "memory", "sharded")
    result = train(asked)
    (changed,) = result.split_events
    assert "rank 0 (here/0) ran out of memory with a batch of 50" in changed.reason
    assert (changed.step, changed.batch_sizes) == (7, [25, 35])
    assert result.steps == 24
    assert result.metrics["loss"] == pytest.approx(loss_alone(asked), rel=1e-4)


@pytest.mark.parametrize(
    ("what", "layout", "step"), [("sharded", "sharded", 7), ("late_multiply", "late-multiply", 8)]
)
def test_a_layer_whose_joint_work_does_not_fit_is_summed_and_no_step_is_lost(
    tmp_path: Path, what: str, layout: str, step: int
) -> None:
    """With late multiply, the others have finished the step, and the rank takes it from them."""
    asked = faulty(tmp_path, what, layout)
    result = train(asked)
    (changed,) = result.split_events
    assert "rank 0 (here/0) ran out of memory in layer out, for which it" in changed.reason
    assert changed.reason.endswith("; layout: hybrid")
    assert (changed.step, changed.batch_sizes) == (step, [50, 10])
    assert changed.layout is not None
    assert changed.layout.sync == {"hidden": LAYOUTS[layout]["sync"]["hidden"]}
    assert result.steps == 24
    assert result.metrics["loss"] == pytest.approx(loss_alone(asked), rel=1e-4)


def test_a_layer_that_is_summed_stays_so_if_the_training_is_continued(tmp_path: Path) -> None:
    asked, stop = faulty(tmp_path, "sharded", "sharded", devices=SLOW), threading.Event()
    watcher = when_checkpoint(tmp_path, 10, stop.set)
    with pytest.raises(Interrupted, match="its checkpoint is kept"):
        train(asked, stop=stop)
    watcher.join()
    result = train(asked)
    assert result.resumed_from_step
    (changed,) = result.split_events
    assert changed.layout is not None
    assert changed.layout.sync == {"hidden": "rows"}
    assert result.metrics["loss"] == pytest.approx(loss_alone(asked), rel=1e-4)


def test_joint_work_that_does_not_fit_ends_a_training_whose_layout_is_given(
    tmp_path: Path,
) -> None:
    asked = faulty(tmp_path, "sharded", "sharded")
    spec = asked.job.train.model_copy(update={"layout": "sharded"})
    job = asked.job.model_copy(update={"train": spec})
    with pytest.raises(TrainingFailed, match="permits no other way") as failed:
        train(asked.model_copy(update={"job": job}))
    assert failed.value.details == {"rank": 0, "layer": "out"}
    assert str(failed.value).endswith("the checkpoint of step 5 is kept")


def test_after_a_loss_that_is_not_a_number_all_rows_come_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    asked = faulty(tmp_path, "nan", "sharded")
    result = train(asked)
    (changed,) = result.split_events
    assert changed.step == 5
    assert "the loss is nan at step 7" in changed.reason
    assert result.steps == 24
    assert result.metrics["loss"] == pytest.approx(loss_alone(asked), rel=0.3)  # half the rate


def test_after_rows_of_one_rank_that_are_not_finite_all_ranks_go_back(tmp_path: Path) -> None:
    asked = faulty(tmp_path, "rows", "sharded")
    result = train(asked)
    (changed,) = result.split_events
    assert changed.step == 5
    assert "parameters are NaN or infinite after step 9" in changed.reason
    assert result.steps == 24
    assert result.metrics["loss"] == pytest.approx(loss_alone(asked), rel=0.3)  # half the rate


@pytest.mark.slow
def test_a_rank_that_hangs_is_replaced(tmp_path: Path, heard: list[dict[str, Any]]) -> None:
    faults = {"stall_timeout": "2s"}
    asked = faulty(tmp_path, "nothing", "late-multiply", devices=SLOW, faults=faults)
    hangs = when_checkpoint(tmp_path, 5, lambda: os.kill(pids(heard)[1], signal.SIGSTOP))
    result = train(asked)
    hangs.join()
    changed = result.split_events[0]
    assert "2 s and was killed; continues with 1 of 2" in changed.reason
    assert changed.step >= 5
    assert result.steps == 24
    assert result.metrics["loss"] == pytest.approx(loss_alone(asked), rel=1e-4)


def summed_on(
    devices: Sequence[Device],
    batches: Sequence[int],
    accumulation: int,
    summed: Collection[str],
    staged: bool,
    slower: Mapping[str, float],
) -> NextLayout:
    """A planner for which all layers are summed."""
    pipelines = [
        Pipeline(micro_batches=[batch], stages=[Stage(device=device.id, layers=[])])
        for device, batch in zip(devices, batches, strict=True)
    ]
    return NextLayout(Layout(pipelines=pipelines), "all layers summed")


@pytest.mark.slow
def test_after_a_killed_rank_the_rest_trains_in_a_layout_of_its_own_until_it_is_back(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    asked = faulty(tmp_path / "a", "nothing", "sharded", devices=SLOW)
    killed = when_checkpoint(tmp_path / "a", 5, lambda: os.kill(pids(heard)[1], signal.SIGKILL))
    result = train(asked, layout_planner=summed_on)
    killed.join()
    assert result.steps == 24
    assert result.metrics["loss"] == pytest.approx(loss_alone(asked), rel=1e-4)
    first, *later = result.split_events
    assert "rank 1 (here/1) was killed by SIGKILL; continues with 1 of 2" in first.reason
    assert first.reason.endswith("; layout: all layers summed")
    assert first.layout is not None
    assert first.layout.devices == ["here/0"]
    assert first.layout.name == "data-parallel"
    for back in later:  # it may come back after the end
        assert back.reason.endswith("is back; continues with 2 of 2; layout: mixed")
        assert back.layout == asked.plan.layout
    losses = {row["step"]: row["loss"] for row in rows(asked, "steps-rank0")}
    again = faulty(tmp_path / "b", "nothing", "sharded")
    again = again.model_copy(update={"replay_events": result.split_events})
    assert train(again).split_events == result.split_events
    assert {row["step"]: row["loss"] for row in rows(again, "steps-rank0")} == losses
