"""A training in any layout equals that of one process on the joint batch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from joint_batch_case import BOUNDS, relative_difference
from layout_ranks import train_in_threads, whole_state, with_layout
from training_case import WEIGHTED, alone, request

from trainwright.tasks.errors import BadInput
from trainwright.tasks.train.rank.rank import Rank

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd"}},
    "momentum, clipped": {"optimizer": {"name": "momentum"}, "clip_norm": 0.5},
    "adamw": {"optimizer": {"name": "adamw", "weight_decay": 0.1}},
}


LAYOUTS: dict[str, dict[str, Any]] = {
    "data-parallel": {"sync": {}},
    "late-multiply": {"sync": {"out": "factors"}},
    "sharded": {"sync": {"out": "rows"}, "rows": {"out": [2, 5, 3]}},
    "sharded on one": {"sync": {"out": "rows"}, "rows": {"out": [0, 10, 0]}},
    "averaging": {"sync": {}, "average_every": 1},
    "mixed": {"sync": {"out": "average"}, "average_every": 1},
}


def state(rank: Rank) -> dict[str, torch.Tensor]:
    """The whole model."""
    return {name: value.clone() for name, value in whole_state(rank)[0].items()}


CASES = [
    (("fp64", "fp32")[(first + second) % 2], layout, way)
    for first, layout in enumerate(LAYOUTS)
    for second, way in enumerate(OPTIMIZERS)
    if layout != "data-parallel"  # in every way: tests of the joint batch
]
"""Each layout in each way, in either precision in turn."""


@pytest.mark.parametrize(("precision", "layout", "way"), CASES)
def test_a_layout_equals_one_process(tmp_path: Path, precision: str, layout: str, way: str) -> None:
    asked = request(
        tmp_path,
        [30, 20, 10],
        validation_fraction=1100 / 1797,
        epochs=2,
        precision=precision,
        **OPTIMIZERS[way],
    )
    found = train_in_threads(with_layout(asked, **LAYOUTS[layout]), tmp_path / "store", state)
    expected = alone(asked)
    for one in found:
        assert relative_difference(one, expected) <= BOUNDS[precision]


@pytest.mark.parametrize(
    ("layout", "loss"), [*zip(LAYOUTS, itertools.cycle(WEIGHTED), strict=False)]
)
def test_a_loss_with_weights_is_the_joint_batchs(tmp_path: Path, layout: str, loss: str) -> None:
    # Of 9 samples, two ranks often have none that counts, and one has none in the last step.
    asked = request(
        tmp_path,
        [5, 3, 1],
        validation_fraction=1625 / 1797,
        precision="fp64",
        **OPTIMIZERS["momentum, clipped"],
    )
    with (Path(asked.source_folder) / "net.py").open("a") as source:
        source.write(WEIGHTED[loss])
    laid_out = with_layout(asked, **LAYOUTS[layout])
    plan = laid_out.plan.model_copy(update={"accumulation": 2})
    laid_out = laid_out.model_copy(update={"plan": plan})

    def state_and_loss(rank: Rank) -> tuple[dict[str, torch.Tensor], float]:
        found = state(rank)
        return found, rank.validate().metrics["loss"]

    found = train_in_threads(laid_out, tmp_path / "store", state_and_loss)
    measured: list[dict[str, float]] = []
    expected = alone(asked, metrics=measured)
    for one, validated in found:
        assert relative_difference(one, expected) <= BOUNDS["fp64"]
        assert validated == pytest.approx(measured[-1]["loss"], rel=1e-12)


def test_a_step_in_which_nothing_has_weight_changes_nothing(tmp_path: Path) -> None:
    asked = request(
        tmp_path, [5, 3], validation_fraction=1625 / 1797, model={"norm": "biased"}, clip_norm=1.0
    )
    nothing = WEIGHTED["a mean"].replace("targets > 5", "targets > 99")
    with (Path(asked.source_folder) / "net.py").open("a") as source:
        source.write(nothing)
    before: dict[int, dict[str, torch.Tensor]] = {}

    def keep(rank: Rank, step: int) -> None:
        before[rank.number] = {name: one.clone() for name, one in rank.model.named_parameters()}

    def state_and_error(rank: Rank) -> tuple[dict[str, torch.Tensor], str]:
        with pytest.raises(BadInput) as raised:
            rank.validate()
        return dict(rank.model.named_parameters()), str(raised.value)

    found = train_in_threads(
        with_layout(asked, {}), tmp_path / "store", state_and_error, most_steps=1, before=keep
    )
    for number, (after, error) in enumerate(found):
        assert all(torch.equal(one, before[number][name]) for name, one in after.items())
        assert error.startswith("loss: its weight is 0 in all 1625 validation samples; allowed")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_of_dropout_are_those_of_one_process(tmp_path: Path, layout: str) -> None:
    asked = request(
        tmp_path,
        [31, 20, 11],  # the last batch of an epoch is smaller
        validation_fraction=1100 / 1797,
        precision="fp64",
        model={"dropout": 0.4},
        optimizer={"name": "momentum"},
    )
    found = train_in_threads(with_layout(asked, **LAYOUTS[layout]), tmp_path / "store", state)
    assert relative_difference(found[0], alone(asked)) <= BOUNDS["fp64"]


def test_copies_that_drifted_apart_are_sent_again(tmp_path: Path) -> None:
    asked = request(
        tmp_path, [30, 20, 10], validation_fraction=1100 / 1797, optimizer={"name": "adamw"}
    )

    def drift(rank: Rank, step: int) -> None:
        if step == 4 and rank.number == 1:  # as if its processor rounded differently
            with torch.no_grad():
                rank.model.get_parameter("out.weight").mul_(1 + 1e-6)

    def after(resend_every: int | None) -> list[dict[str, torch.Tensor]]:
        late = with_layout(asked, {"out": "factors"}, resend_every=resend_every)
        folder = tmp_path / str(resend_every)
        return train_in_threads(late, folder, state, most_steps=6, before=drift)

    first, drifted, _ = after(None)
    assert not torch.equal(first["out.weight"], drifted["out.weight"])
    first, *others = after(5)
    for one in others:
        assert all(torch.equal(one[name], value) for name, value in first.items())
