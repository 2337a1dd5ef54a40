"""Batch normalisation in stages by the statistics of each micro-batch, if the layout says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from joint_batch_case import BOUNDS, relative_difference
from layout_ranks import train_in_threads
from staged_case import with_stages
from test_compositions import state
from training_case import alone, request

from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.batch.sampling import shares

OWN: dict[str, Any] = {"batch_norm": "micro-batch"}


def asked_for(folder: Path, batch_sizes: list[int], validation: float = 1110) -> TrainRequest:
    return request(
        folder,
        batch_sizes,
        validation_fraction=validation / 1797,
        epochs=2,
        precision="fp64",
        model={"norm": True},
        optimizer={"name": "adamw", "weight_decay": 0.1},
        clip_norm=1.0,
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_each_micro_batch_has_its_own_statistics(tmp_path: Path, schedule: Any) -> None:
    sizes = [20, 15, 10, 15]
    asked = asked_for(tmp_path, [60, 0])
    staged = with_stages(asked, [(sizes, [0.5])], schedule, **OWN)
    found = train_in_threads(staged, tmp_path / "store", state)
    expected = alone(asked, parts=lambda total: shares(total, sizes))
    for one in found:
        assert relative_difference(one, expected) <= BOUNDS["fp64"]


def test_running_statistics_of_several_pipelines_are_averaged(tmp_path: Path) -> None:
    sizes = [[20, 15], [10, 15]]
    asked = asked_for(tmp_path, [35, 0, 25, 0])
    staged = with_stages(asked, [(one, [0.5]) for one in sizes], **OWN)
    found = train_in_threads(staged, tmp_path / "store", state)
    expected = alone(asked, parts=lambda total: shares(total, sizes[0] + sizes[1]))
    statistics = {name for name in expected if name.startswith("norm.") and "_" in name}
    assert statistics == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    trained = {name: one for name, one in expected.items() if name not in statistics}
    for one in found:
        assert relative_difference({name: one[name] for name in trained}, trained) <= BOUNDS["fp64"]
        for name in statistics:
            assert (one[name] == found[0][name]).all()
        # Half as many updates, of about as many samples each: the averages are alike.
        assert (
            relative_difference(
                {"mean": one["norm.running_mean"]}, {"mean": expected["norm.running_mean"]}
            )
            <= 0.2
        )


def test_a_micro_batch_of_one_sample_takes_the_running_statistics(tmp_path: Path) -> None:
    """The last step of an epoch has one row; torch's own code would raise an error."""
    asked = asked_for(tmp_path, [60, 0], validation=1076)
    asked = asked.model_copy(
        update={
            "job": asked.job.model_copy(
                update={
                    "model": asked.job.model.model_copy(update={"config": {"norm": "features"}})
                }
            )
        }
    )
    staged = with_stages(asked, [([30, 30], [0.5])], **OWN)
    for one in train_in_threads(staged, tmp_path / "store", state):
        assert all(bool(value.isfinite().all()) for value in one.values())
