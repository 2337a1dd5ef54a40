"""Stages that recompute change nothing: a training is that of one process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from families import source_of
from joint_batch_case import BOUNDS, largest_difference, relative_difference
from layout_ranks import train_in_threads
from staged_case import recomputing, with_stages, without_dropout
from test_pipelines import request_of, state
from torch import nn
from training_case import NO_SPARE, alone, request

from trainwright.estimator.trace.cuts.model_cuts import cut
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import StageSchedule
from trainwright.tasks.train import train
from trainwright.tasks.train.pipeline.stage_model import StageModel
from trainwright.tasks.train.rank.rank import Rank


@pytest.mark.parametrize(
    ("schedule", "parts"), [("gpipe", 2), ("1f1b", 1), ("zero-bubble", 1), ("zero-bubble", 2)]
)
def test_a_pipeline_that_recomputes_equals_one_process(
    tmp_path: Path, schedule: StageSchedule, parts: int
) -> None:
    # Without dropout: threads share the random numbers that a second pass restores.
    asked = request(
        tmp_path,
        [60, 0],
        validation_fraction=1110 / 1797,
        epochs=2,
        precision="fp64",
        optimizer={"name": "momentum"},
    )
    staged = with_stages(asked, [([20, 15, 15, 10], [0.5])], schedule)
    found = train_in_threads(recomputing(staged, parts), tmp_path / "store", state)
    expected = alone(asked)
    for one in found:
        assert relative_difference(one, expected) <= BOUNDS["fp64"]


@pytest.mark.parametrize(
    "family",
    [
        "convolutions with norms",
        "U-Net",
        "two-way GRU",
        "transformer",
        "tied embedding",
        "shared layer, used twice",
    ],
)
def test_a_model_of_any_family_is_recomputed_in_its_stages(tmp_path: Path, family: str) -> None:
    def evaluate(rank: Rank, step: int) -> None:
        if step == 7:
            rank.validate()

    joint = "norm" in source_of(family).lower()
    sizes = ([40], [22]) if joint else ([10] * 4, [8, 7, 7])
    asked = request_of(tmp_path, [40, 0, 22, 0], family)
    source = Path(asked.source_folder) / "net.py"
    source.write_text(without_dropout(source.read_text()))
    staged = with_stages(asked, [(sizes[0], [0.5]), (sizes[1], [0.5])])
    found = train_in_threads(recomputing(staged), tmp_path / "store", state, before=evaluate)
    expected = alone(asked)
    for one in found:
        assert relative_difference(one, expected) <= BOUNDS["fp64"]


def test_dropout_has_the_masks_of_the_first_pass_on_real_ranks(tmp_path: Path) -> None:
    asked = request(
        tmp_path,
        [40, 0],
        validation_fraction=1100 / 1797,
        epochs=1,
        backend="torch",
        precision="fp64",
        optimizer={"name": "momentum"},
        model={"dropout": 0.4},
        **NO_SPARE,
    )
    staged = recomputing(with_stages(asked, [([10] * 4, [0.5])], "zero-bubble"))
    result = train(staged)
    assert largest_difference(tmp_path / "run", result.steps, alone(asked)) <= BOUNDS["fp64"]


def test_what_a_stage_does_not_compute_is_refused(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 0], epochs=1)
    staged = with_stages(asked, [([20, 20], [0.5])])
    layout = staged.plan.layout
    assert layout is not None
    stages = layout.pipelines[0].stages
    wrong = [stages[0].model_copy(update={"recompute": ["nothing"]}), stages[1]]
    pipelines = [layout.pipelines[0].model_copy(update={"stages": wrong})]
    plan = staged.plan.model_copy(
        update={"layout": layout.model_copy(update={"pipelines": pipelines})}
    )
    with pytest.raises(BadInput, match="recompute: got 'nothing'; allowed: modules of the stage"):
        train_in_threads(staged.model_copy(update={"plan": plan}), tmp_path / "store", state)


def test_calls_are_made_again_for_a_backward_pass_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    calls: list[int] = []
    found = cut(lambda: copy.deepcopy(model), lambda size: torch.zeros(size, 4))
    for number, module in enumerate(model):
        module.register_forward_hook(lambda *_, number=number: calls.append(number))
    stage = StageModel(model, found, 0, len(found.units), ["0..2"])
    inputs = torch.randn(3, 4)
    with torch.no_grad():
        stage(inputs, 3)
    assert calls == [0, 1, 2, 3, 4]
    stage(inputs, 3).sum().backward()
    assert calls[5:10] == [0, 1, 2, 3, 4]
    assert calls[10:] == [0, 1]  # what the last call of the run saves is there by then


class _ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first = self.first(inputs) * 2
        second = self.second(first) * 2
        first += second
        return self.last(first)


def test_a_run_whose_argument_is_changed_in_place_is_refused() -> None:
    found = cut(_ChangesInput, lambda size: torch.zeros(size, 4))
    with pytest.raises(BadInput, match="changes in place what second computes from"):
        StageModel(_ChangesInput(), found, 0, len(found.units), ["second"])
