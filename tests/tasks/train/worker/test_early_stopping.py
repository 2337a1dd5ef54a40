"""Trainings that end before their last epoch, and what their result says."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from training_case import NO_SPARE, request, rows

from trainwright.tasks import progress
from trainwright.tasks.errors import Interrupted
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.spec.train_spec import TrainSpec
from trainwright.tasks.train import train
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.worker.early_stopping import deciding_metric, early_stop

WORSENS = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(64, 10)
        self.register_buffer("validations", torch.zeros(1))

    def forward(self, images):
        outputs = self.out(images.flatten(1))
        if self.training:
            return outputs
        # from the third validation on, the outputs are wrong, and worse each time
        with torch.no_grad():
            self.validations += 1
        return outputs if self.validations <= 2 else -self.validations * outputs


def build_model():
    return Net()
"""
"""Its loss rises from the third epoch on. (Validation takes one batch of all rows.)"""
STOPPING: dict[str, Any] = {
    "epochs": 20,
    "backend": "torch",
    "schedule": "cosine",
    "early_stopping": {"patience": 2, "metric": "loss"},
    **NO_SPARE,
}


def worsening(folder: Path, **train_spec: Any) -> Any:
    # 1,438 rows in steps of 400: 4 an epoch; one rank validates, in one batch
    asked = request(folder, [400, 0], **{**STOPPING, **train_spec})
    (folder / "source" / "net.py").write_text(WORSENS)
    return asked


def test_a_training_ends_when_its_metric_has_not_improved_and_keeps_the_best_epoch(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    asked = worsening(tmp_path)
    result = train(asked)
    assert (result.state, result.steps) == ("success", 16)
    found = result.early_stopped
    assert found is not None
    assert (found.epochs, found.metric, found.best_epoch) == (4, "loss", 2)
    epochs = rows(asked, "epochs")
    assert [row["loss"] for row in epochs][1] == min(row["loss"] for row in epochs) == found.best
    assert "ended after epoch 4 of 20: loss has not improved for 2 evaluations" in found.reason
    notices = [event["message"] for event in heard if event["event"] == "notice"]
    assert f"training {found.reason}" in notices
    # the stored model, and the metrics, are those of the best epoch
    assert result.model_step == 8
    assert result.metrics["loss"] == found.best
    # the schedule is that of all 20 epochs: the rate has hardly fallen
    rates = [row["learning_rate"] for row in rows(asked, "steps-rank0")]
    assert rates[-1] > 0.85 * rates[0]
    assert Result.model_validate_json(result.model_dump_json()) == result


def test_all_ranks_end_at_the_same_step(tmp_path: Path) -> None:
    asked = request(tmp_path, [30, 30], **{**STOPPING, "epochs": 30}, model={"norm": True})
    spec = asked.job.train.model_copy(
        update={"early_stopping": asked.job.train.early_stopping.model_copy(update={"patience": 1})}  # type: ignore[union-attr]
    )
    asked = asked.model_copy(
        update={"job": asked.job.model_copy(update={"train": spec}), "learning_rate": 0.5}
    )
    result = train(asked)
    assert result.early_stopped is not None
    assert result.steps == 24 * result.early_stopped.epochs < 24 * 30
    for rank in range(2):
        assert [row["step"] for row in rows(asked, f"steps-rank{rank}")] == list(
            range(result.steps)
        )
    assert len(rows(asked, "epochs")) == result.early_stopped.epochs


def test_a_training_that_ended_early_is_not_continued(tmp_path: Path) -> None:
    """As after a kill between its last checkpoint and its result."""
    asked = worsening(tmp_path)
    first, again = train(asked), train(asked)
    assert again.early_stopped == first.early_stopped
    assert (again.steps, again.metrics) == (first.steps, first.metrics)
    assert again.resumed_from_step == first.steps


def test_a_stopped_training_counts_the_evaluations_before_the_stop(tmp_path: Path) -> None:
    asked, stop = worsening(tmp_path, checkpoint={"every_steps": 1}), threading.Event()

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "epoch" and event["epoch"] == 2:  # the third: the loss has risen once
            stop.set()

    with progress.listening(hear), pytest.raises(Interrupted):
        train(asked, stop=stop)
    result = train(asked)
    assert result.resumed_from_step is not None
    assert 12 <= result.resumed_from_step < 16
    assert result.early_stopped is not None
    assert (result.steps, result.early_stopped.best_epoch) == (16, 2)


def test_without_improvement_in_the_last_epoch_the_training_is_simply_done(tmp_path: Path) -> None:
    result = train(worsening(tmp_path, epochs=4))
    assert (result.steps, result.early_stopped) == (16, None)
    assert (result.model_step, result.model_in_words) == (8, f"epoch 2 of {result.epochs}")


def test_of_equally_good_epochs_that_with_the_lowest_loss_is_stored(tmp_path: Path) -> None:
    constant = """
        with torch.no_grad():
            self.validations += 1
            height = (3.0, 2.0, 0.5, 1.0)[int(self.validations) - 1]
            return height * torch.nn.functional.one_hot(outputs.argmax(1) * 0, 10).float()
"""
    start, end = WORSENS.index("        # from the third"), WORSENS.index("\n\ndef build_model")
    asked = worsening(tmp_path, epochs=4, early_stopping={"patience": 9})
    source = WORSENS[:start] + constant.strip("\n") + WORSENS[end:]
    (tmp_path / "source" / "net.py").write_text(source)
    result = train(asked)
    epochs = rows(asked, "epochs")
    assert len({row["accuracy"] for row in epochs}) == 1
    assert result.model_step == 12
    assert result.metrics["loss"] == epochs[2]["loss"] == min(row["loss"] for row in epochs)


def test_without_the_best_checkpoint_the_last_one_is_the_model(tmp_path: Path) -> None:
    asked = worsening(tmp_path, checkpoint={"every_steps": 5, "keep_best": False})
    result = train(asked)
    assert result.model_step == result.steps == 16
    assert result.metrics["loss"] == rows(asked, "epochs")[-1]["loss"]


@pytest.mark.parametrize(
    ("spec", "metric"),
    [
        ({}, "accuracy"),
        ({"target": {"metric": "f1", "value": 0.5}}, "f1"),
        (
            {
                "target": {"metric": "f1", "value": 0.5},
                "early_stopping": {"patience": 1, "metric": "auc"},
            },
            "auc",
        ),
        (
            {"target": {"metric": "f1", "value": 0.5}, "early_stopping": {"patience": 1}},
            "f1",
        ),
        ({"early_stopping": {"patience": 1, "metric": "rmse"}}, "loss"),
    ],
)
def test_one_metric_decides_about_the_best_epoch_and_the_end(
    spec: dict[str, Any], metric: str
) -> None:
    found = {"loss": 1.0, "accuracy": 0.5, "f1": 0.5, "auc": 0.5}
    assert deciding_metric(TrainSpec.model_validate(spec), found) == metric


def test_a_metric_that_was_never_finite_is_said() -> None:
    spec = TrainSpec.model_validate({"early_stopping": {"patience": 1}})
    found = early_stop(spec, {"loss": float("nan")}, epochs=2, since_best=1, best_score=None)
    assert found.best is None
    assert "none was finite" in found.reason


def test_checkpoints_of_earlier_versions_count_no_evaluations() -> None:
    state = files.parsed(b'{"step": 1, "epoch": 0, "split": [1]}')
    assert (state.since_best, state.ended) == (0, False)
