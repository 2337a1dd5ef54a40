"""Augmented training images are the same for every split of the batch."""

from __future__ import annotations

from pathlib import Path

from joint_batch_case import relative_difference
from layout_ranks import train_in_threads
from test_joint_batch import state
from training_case import alone, request


def test_unequal_ranks_see_the_images_of_one_process_in_each_epoch(tmp_path: Path) -> None:
    asked = request(
        tmp_path,
        [40, 20],
        validation_fraction=1077 / 1797,
        epochs=2,
        precision="fp64",
        augment="flip-crop",
    )
    found = train_in_threads(asked, tmp_path / "store", state)[0]
    plain = asked.model_copy(
        update={
            "job": asked.job.model_copy(
                update={"data": asked.job.data.model_copy(update={"augment": "none"})}
            )
        }
    )
    assert relative_difference(found, alone(asked)) <= 1e-12
    assert relative_difference(found, alone(plain)) > 1e-3
