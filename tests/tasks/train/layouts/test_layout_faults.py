"""Real ranks of a layout run out of memory, diverge or hang: the training goes on and ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from layout_ranks import with_layout
from training_case import SLOW, alone, pids, request, when_checkpoint

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
    if what == "factors" and os.environ.get("HOROVOD_RANK") == "0":
        out_of_memory_once(net)
    return net

def not_finite_once(net):
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def spoil(optimizer, *_):
        if net.calls == 10 and not net.mark.exists():
            net.mark.touch()
            with torch.no_grad():
                net.hidden.weight[0, 0] = float("nan")

    register_optimizer_step_post_hook(spoil)

def out_of_memory_once(net):
    from trainwright.tasks.train.layouts import late_multiply

    multiply = late_multiply.multiply

    def fails(*factors):
        if net.calls == 8 and not net.mark.exists():
            net.mark.touch()
            raise MemoryError
        return multiply(*factors)

    late_multiply.multiply = fails
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


@pytest.mark.parametrize(
    ("what", "layout", "step"), [("memory", "sharded", 7), ("factors", "late-multiply", 8)]
)
def test_a_rank_out_of_memory_gets_a_smaller_batch_and_no_step_is_lost(
    tmp_path: Path, what: str, layout: str, step: int
) -> None:
    """The second takes the step, which the others have finished, from them."""
    asked = faulty(tmp_path, what, layout)
    result = train(asked)
    (changed,) = result.split_events
    assert "rank 0 (here/0) ran out of memory with a batch of 50" in changed.reason
    assert (changed.step, changed.batch_sizes) == (step, [25, 35])
    assert result.steps == 24
    assert result.metrics["loss"] == pytest.approx(loss_alone(asked), rel=1e-4)


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
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_hangs_is_replaced(
    tmp_path: Path, heard: list[dict[str, Any]], layout: str
) -> None:
    faults = {"stall_timeout": "2s"}
    asked = faulty(tmp_path, "nothing", layout, devices=SLOW, faults=faults)
    hangs = when_checkpoint(tmp_path, 5, lambda: os.kill(pids(heard)[1], signal.SIGSTOP))
    result = train(asked)
    hangs.join()
    changed = result.split_events[0]
    assert "2 s and was killed; continues with 1 of 2" in changed.reason
    assert changed.step >= 5
    assert result.steps == 24
    assert result.metrics["loss"] == pytest.approx(loss_alone(asked), rel=1e-4)
