"""A training on data that the model's source reads equals the one on the same data read by us."""

from __future__ import annotations

from pathlib import Path

import doors
import numpy as np
from training_case import MODEL, NO_SPARE, request

from trainwright.tasks.data.dataset import load
from trainwright.tasks.data.model_reader import schema_of_model
from trainwright.tasks.data.sources import localized
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.train import train

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


def test_two_ranks_train_the_same_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    digits = load(DataSpec(uri="builtin:digits"))
    inputs, labels = digits.batch(np.arange(digits.schema.rows))
    arrays = {"images": inputs["inputs"], "labels": labels}
    parts = {"train": digits.split.train, "validation": digits.split.validation}
    np.savez(tmp_path / "own.data", **arrays, **parts)
    (tmp_path / "own.data.npz").rename(tmp_path / "own.data")

    models = []
    for name in ("ours", "theirs"):
        folder = tmp_path / name
        asked = request(folder, [40, 20], backend="torch", **NO_SPARE)
        if name == "theirs":
            (folder / "source" / "net.py").write_text(MODEL + READER)
            given = DataSpec(uri=str(tmp_path / "own.data"), reader="model")
            spec = localized(given, doors.settings())
            assert asked.job.model is not None
            schema = schema_of_model(asked.job.model, spec, doors.settings())
            assert schema.task == "image-classification"
            job = asked.job.model_copy(update={"data": spec})
            asked = asked.model_copy(update={"job": job, "schema_": schema})
        step = train(asked).steps
        models.append(load_file(folder / f"run/checkpoints/step-{step:08d}/model.safetensors"))
    ours, theirs = models
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
