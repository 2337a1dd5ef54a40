"""A training on data that the model's source reads: as on the same data read by us, bad samples."""

from __future__ import annotations

from pathlib import Path

import doors
import numpy as np
import pytest
from training_case import MODEL, NO_SPARE, request

from trainwright.tasks.data.dataset import load
from trainwright.tasks.data.model_schema import schema_of_model
from trainwright.tasks.data.sources import localized
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.train import TrainRequest, train

READER = """
import numpy as np


class Digits(torch.utils.data.Dataset):
    classes = list(range(10))

    def __init__(self, uri, part):
        with np.load(uri) as file:
            self.images, self.labels = file["images"][file[part]], file["labels"][file[part]]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, place):
        return torch.from_numpy(self.images[place]), int(self.labels[place])


def dataset(uri, part):
    return Digits(uri, part)
"""


def write_digits(file: Path, bad_part: str | None = None) -> None:
    """The digits in a file that `READER` reads; sample 17 of a part has two values that are NaN."""
    digits = load(DataSpec(uri="builtin:digits"))
    inputs, labels = digits.batch(np.arange(digits.schema.rows))
    parts = {"train": digits.split.train, "validation": digits.split.validation}
    arrays = {"images": inputs["inputs"], "labels": labels, **parts}
    if bad_part is not None:
        arrays["images"][arrays[bad_part][17], 0, :2, 3] = np.nan
    with file.open("wb") as opened:
        np.savez(opened, **arrays)


def by_reader(asked: TrainRequest, file: Path) -> TrainRequest:
    """The same training on data that the model's source reads from a file."""
    Path(asked.source_folder, "net.py").write_text(MODEL + READER)
    spec = localized(DataSpec(uri=str(file), reader="model"), doors.settings())
    assert asked.job.model is not None
    keeping = spec.model_copy(update={"missing": "keep"})  # so that training meets them
    schema = schema_of_model(asked.job.model, keeping, doors.settings())
    assert schema.task == "image-classification"
    job = asked.job.model_copy(update={"data": spec})
    return asked.model_copy(update={"job": job, "schema_": schema})


def test_two_ranks_train_the_same_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_digits(tmp_path / "own.data")
    models = []
    for name in ("ours", "theirs"):
        folder = tmp_path / name
        # The last batch of an epoch has one row: one rank has none, and its source is not asked.
        asked = request(folder, [400, 79], backend="torch", **NO_SPARE)
        if name == "theirs":
            asked = by_reader(asked, tmp_path / "own.data")
        step = train(asked).steps
        models.append(load_file(folder / f"run/checkpoints/step-{step:08d}/model.safetensors"))
    ours, theirs = models
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_sample_that_makes_the_loss_nan_is_named(tmp_path: Path, part: str) -> None:
    file = tmp_path / "own.data"
    write_digits(file, bad_part=part)
    asked = by_reader(request(tmp_path / "run", [40, 20], backend="torch", **NO_SPARE), file)
    said = f"data: sample 17 of the part {part}: inputs: 2 of 64 values are NaN; allowed: finite"
    with pytest.raises(BadInput, match=said):
        train(asked)
