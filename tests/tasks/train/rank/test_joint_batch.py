"""Ranks with unequal batches equal one process on the joint batch, with either library."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from joint_batch_case import (
    BOUNDS,
    SPLITS,
    WAYS,
    flat,
    joint,
    largest_difference,
    normalized,
    normalized_single,
    relative_difference,
)
from layout_ranks import train_in_threads, whole_state
from training_case import NO_SPARE, WEIGHTED, alone, request, rows, scalars

from trainwright.tasks.train import train
from trainwright.tasks.train.rank.rank import Rank

CASES = [
    (split, way, list(BOUNDS)[(first + second) % 2])
    for first, split in enumerate(SPLITS)
    for second, way in enumerate(WAYS)
]
"""Each split in each way, in either precision in turn; the benchmark has all cases."""
OWN_LOSS = """

def loss(outputs, targets, label_smoothing=0.0):
    return torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=label_smoothing)
"""


def state(rank: Rank) -> dict[str, Any]:
    """The whole model."""
    return {name: value.clone() for name, value in whole_state(rank)[0].items()}


@pytest.mark.parametrize(("split", "way", "precision"), CASES)
def test_unequal_ranks_equal_one_process_in_every_way(
    tmp_path: Path, split: str, way: str, precision: str
) -> None:
    asked = joint(tmp_path, "torch", split, way, precision)
    expected = alone(asked)
    for found in train_in_threads(asked, tmp_path / "store", state):
        assert relative_difference(found, expected) <= BOUNDS[precision]


@pytest.mark.parametrize(
    ("backend", "split", "way", "precision"),
    [
        ("horovod", "2:1:0", "clipped", "fp32"),
        ("horovod", "3:1", "adamw", "fp64"),
        ("torch", "5:3:1:1", "accumulated", "fp32"),
    ],
)
def test_real_ranks_equal_one_process_after_50_steps(
    tmp_path: Path, backend: str, split: str, way: str, precision: str
) -> None:
    asked = joint(tmp_path, backend, split, way, precision)
    result = train(asked)
    assert (result.steps, result.backend.split(".")[0]) == (50, backend)
    assert largest_difference(tmp_path / "run", 50, alone(asked)) <= BOUNDS[precision]


def test_metrics_are_means_over_all_rows_for_any_split(tmp_path: Path) -> None:
    # Uneven shares (39 and 19 of an epoch's last 58 rows, 239 and 120 of the 359 held-out rows),
    # and a loss that weighs classes, so that the mean of the ranks' means would differ.
    asked = request(tmp_path, [40, 20], epochs=2, backend="torch", precision="fp64", **NO_SPARE)
    with (tmp_path / "source" / "net.py").open("a") as source:
        source.write(WEIGHTED["a pair"])
    assert train(asked).steps == 48
    expected: list[dict[str, float]] = []
    alone(asked, metrics=expected)
    steps = [one for one in expected if "epoch" not in one]
    exactly = {"rel": 1e-12, "abs": 0.0}
    for rank in (0, 1):
        found = [row["loss"] for row in rows(asked, f"steps-rank{rank}")]
        assert found == pytest.approx([one["loss"] for one in steps], **exactly)
    shown = [value for _, value in scalars(asked)["accuracy/train"]]
    assert shown == pytest.approx([one["accuracy"] for one in steps], rel=1e-6)  # in fp32
    epochs = [one for one in expected if "epoch" in one]
    for own, batches, one in zip(
        rows(asked, "epochs"), (steps[:24], steps[24:]), epochs, strict=True
    ):
        total = sum(batch["loss"] * batch["weight"] for batch in batches)
        weight = sum(batch["weight"] for batch in batches)
        assert own["train_loss"] == pytest.approx(total / weight, **exactly)
        assert own["loss"] == pytest.approx(one["loss"], **exactly)
        assert (own["epoch"], own["accuracy"]) == (one["epoch"], one["accuracy"])


@pytest.mark.parametrize("loss", ["", OWN_LOSS], ids=["the task's loss", "the source's loss"])
def test_labels_are_smoothed_in_training_only(tmp_path: Path, loss: str) -> None:
    asked = joint(tmp_path, "torch", "3:1", "smoothed", "fp64")
    with (tmp_path / "source" / "net.py").open("a") as source:
        source.write(loss)
    train(asked)
    expected: list[dict[str, float]] = []
    assert (
        largest_difference(tmp_path / "run", 50, alone(asked, metrics=expected)) <= BOUNDS["fp64"]
    )
    plain = [one["loss"] for one in expected if "epoch" in one]
    assert [row["loss"] for row in rows(asked, "epochs")] == pytest.approx(plain, rel=1e-12)
    unsmoothed = [one["loss"] for one in expected if "epoch" not in one]
    losses = [row["loss"] for row in rows(asked, "steps-rank0")]
    assert losses[-1] > 1.05 * unsmoothed[-1]


def test_batch_norm_sees_the_joint_batch_in_double_precision(tmp_path: Path) -> None:
    asked = normalized(tmp_path, "horovod", True)
    result = train(asked)
    assert result.steps == 50
    assert [device.samples for device in result.devices] == [1442, 720, 240]
    assert largest_difference(tmp_path / "run", 50, alone(asked)) <= 1e-12


def test_batch_norm_after_a_bias_differs_only_by_noise_that_adam_amplifies(tmp_path: Path) -> None:
    # The gradient of such a bias is only rounding noise, which Adam normalises to a full step. One
    # process with reordered samples differs as much.
    asked = normalized(tmp_path, "torch", "biased")
    expected = alone(asked)
    found = train_in_threads(asked, tmp_path / "store", state)[0]
    assert relative_difference({"all": flat(found)}, {"all": flat(expected)}) <= 1e-8
    by_order = relative_difference(alone(asked, reordered=0), expected)
    assert relative_difference(found, expected) <= 2 * by_order


def test_batch_norm_in_single_precision_differs_as_another_order_of_samples_does(
    tmp_path: Path,
) -> None:
    asked = normalized_single(tmp_path, "torch")
    expected = alone(asked)
    by_order = [relative_difference(alone(asked, reordered=seed), expected) for seed in range(3)]
    found = train_in_threads(asked, tmp_path / "store", state)[0]
    assert relative_difference(found, expected) <= 2 * statistics.median(by_order)


def test_batch_norm_sees_the_joint_batch_in_single_precision_for_one_step(tmp_path: Path) -> None:
    asked = request(
        tmp_path,
        [80, 40],
        validation_fraction=1677 / 1797,
        model={"norm": True},
        backend="torch",
        **NO_SPARE,
    )
    assert train(asked).steps == 1
    assert largest_difference(tmp_path / "run", 1, alone(asked)) <= 1e-6


def test_micro_batches_add_up_to_the_joint_batch(tmp_path: Path) -> None:
    # One rank has fewer samples than micro-batches, and the last step takes only 10 rows.
    asked = request(
        tmp_path,
        [40, 17, 3],
        validation_fraction=587 / 1797,
        backend="horovod",
        precision="fp64",
        **NO_SPARE,
    )
    asked = asked.model_copy(update={"plan": asked.plan.model_copy(update={"accumulation": 4})})
    assert train(asked).steps == 21
    assert largest_difference(tmp_path / "run", 21, alone(asked)) <= 1e-12


def test_batch_norm_takes_the_statistics_of_each_micro_batch_over_all_ranks(tmp_path: Path) -> None:
    asked = request(
        tmp_path,
        [40, 17, 3],
        validation_fraction=1677 / 1797,
        model={"norm": True},
        precision="fp64",
        **NO_SPARE,
    )
    asked = asked.model_copy(update={"plan": asked.plan.model_copy(update={"accumulation": 4})})
    for found in train_in_threads(asked, tmp_path / "store", state):
        assert int(found["norm.num_batches_tracked"]) == 2 * 4
