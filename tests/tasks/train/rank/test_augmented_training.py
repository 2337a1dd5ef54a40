"""Augmented training images are the same for every split of the batch."""

from __future__ import annotations

from pathlib import Path

from joint_batch_case import largest_difference
from training_case import NO_SPARE, alone, request

from trainwright.tasks.train import train


def test_unequal_ranks_see_the_images_of_one_process_in_each_epoch(tmp_path: Path) -> None:
    asked = request(
        tmp_path,
        [40, 20],
        epochs=2,
        backend="torch",
        precision="fp64",
        augment="flip-crop",
        **NO_SPARE,
    )
    result = train(asked)
    plain = asked.model_copy(
        update={"job": asked.job.model_copy(update={"data": request(tmp_path, [60]).job.data})}
    )
    assert largest_difference(tmp_path / "run", result.steps, alone(asked)) <= 1e-12
    assert largest_difference(tmp_path / "run", result.steps, alone(plain)) > 1e-3
