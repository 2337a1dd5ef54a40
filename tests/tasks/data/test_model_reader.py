"""Data that the model's source reads: its schema from the sandbox, batches by row, bad sources."""

from __future__ import annotations

from pathlib import Path

import doors
import numpy as np
import pytest
import torch

from trainwright.estimator.trace import source as model_source
from trainwright.tasks.data import model_schema
from trainwright.tasks.data.model_reader import ModelReader
from trainwright.tasks.data.model_schema import schema_of_model
from trainwright.tasks.data.sources import content_sha256, localized
from trainwright.tasks.errors import BadInput
from trainwright.tasks.extract import batch_spec, extract_model
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.job import ModelSpec

SOURCE = """
import torch


class Lines(torch.utils.data.Dataset):
    classes = ["even", "odd"]

    def __init__(self, uri, part, width):
        numbers = [int(line) for line in open(uri)]
        self.numbers = numbers[:-4] if part == "train" else numbers[-4:]
        self.width = width

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, place):
        number = self.numbers[place]
        return torch.full((self.width,), float(number)), number % 2


def dataset(uri, part, width=3):
    return Lines(uri, part, width)


def build_model(width=3):
    return torch.nn.Linear(width, 2)
"""


@pytest.fixture(autouse=True)
def _own_precision() -> None:
    """Ranks that other tests run in this process leave the default type of their precision."""
    torch.set_default_dtype(torch.float32)


def files(folder: Path, source: str = SOURCE) -> tuple[ModelSpec, DataSpec]:
    folder.joinpath("numbers.txt").write_text("".join(f"{number}\n" for number in range(20, 40)))
    folder.joinpath("source").mkdir()
    folder.joinpath("source", "net.py").write_text(source)
    data = DataSpec(uri=str(folder / "numbers.txt"), reader="model")
    model = ModelSpec(source=str(folder / "source" / "net.py"), config={"width": 5})
    return model, localized(data, doors.settings())


def schema(folder: Path, source: str = SOURCE, **fields: object) -> DataSchema:
    model, data = files(folder, source)
    return schema_of_model(model, data.model_copy(update=fields), doors.settings())


def reader(folder: Path, validated: DataSchema | None = None) -> ModelReader:
    definition = model_source.load(folder / "source", "net.py")
    data = DataSpec(uri=str(folder / "numbers.txt"), reader="model")
    return ModelReader(definition, data, {"width": 5}, validated)


def test_the_schema_is_derived_in_the_sandbox(tmp_path: Path) -> None:
    found = schema(tmp_path)
    assert found.task == "tabular-classification"
    assert (found.rows, found.train_rows, found.validation_rows) == (20, 16, 4)
    assert (found.inputs, found.input_dtypes) == ({"inputs": (5,)}, {"inputs": "float32"})
    assert (found.target_dtype, found.target_shape, found.classes) == ("int64", (), ["even", "odd"])
    assert found.sha256 == content_sha256(DataSpec(uri=str(tmp_path / "numbers.txt")))


def test_rows_of_the_validation_part_follow_those_for_training(tmp_path: Path) -> None:
    found = schema(tmp_path)
    data = reader(tmp_path, found)
    assert data.schema == found
    assert data.names() == {"label": ["even", "odd"]}
    rows = np.array([15, 0, 19, 16, 3])
    inputs, targets = data.batch(rows)
    assert inputs["inputs"].tolist() == [[20.0 + row] * 5 for row in rows]
    assert targets.tolist() == [row % 2 for row in rows]
    assert sorted([*data.split.train, *data.split.validation]) == list(range(20))


def test_a_source_may_make_its_own_batches(tmp_path: Path) -> None:
    source = SOURCE.replace('classes = ["even", "odd"]', "") + (
        "\n\ndef collate(samples):\n"
        "    numbers = torch.stack([one for one, _ in samples])\n"
        "    return {'a': numbers, 'b': numbers[:, 0].long()}, numbers[:, :2]\n"
    )
    found = schema(tmp_path, source)
    assert (found.task, found.classes) == ("custom", None)
    assert found.inputs == {"a": (5,), "b": ()}
    assert found.input_dtypes == {"a": "float32", "b": "int64"}
    assert (found.target_dtype, found.target_shape) == ("float32", (2,))
    inputs, targets = reader(tmp_path, found).batch(np.array([1, 0]))
    assert (inputs["b"].tolist(), targets.tolist()) == ([21, 20], [[21, 21], [20, 20]])


def test_inputs_may_be_nested_as_those_of_example_batch(tmp_path: Path) -> None:
    """Samples are tuples within tuples and dicts; the model gets the same, as batches."""
    source = SOURCE.replace(
        "return torch.full((self.width,), float(number)), number % 2",
        "row = torch.full((self.width,), float(number))\n"
        "        return (row, ({'scale': row}, number)), number % 2",
    ).replace(
        "return torch.nn.Linear(width, 2)",
        "return Net(width)\n\n\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self, width):\n"
        "        super().__init__(width, 2)\n\n"
        "    def forward(self, inputs):\n"
        "        row, (more, number) = inputs\n"
        "        return super().forward(row * more['scale']) + number[:, None]",
    )
    found = schema(tmp_path, source)
    assert found.inputs == {"0": (5,), "1.0.scale": (5,), "1.1": ()}
    assert found.nesting == ["0", [{"scale": "1.0.scale"}, "1.1"]]
    inputs, _ = reader(tmp_path, found).batch(np.array([1, 0]))
    row, (more, number) = model_source.nested(inputs, found.nesting)
    assert (row[:, 0].tolist(), number.tolist()) == ([21, 20], [21, 20])
    assert more["scale"].shape == (2, 5)
    model = ModelSpec(source=str(tmp_path / "source" / "net.py"), config={"width": 5})
    structure = extract_model(model, doors.settings(), batch_size=4, spec=batch_spec(found))
    assert structure.parameters == 12


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def dataset(", "def other(", r"defines no function dataset\(uri, part, \*\*config\)"),
        ("int(line)", "int(line) / 0", r"model\.source: dataset\(.*\) raised ZeroDivisionError"),
        ("numbers[-4:]", "[]", "has 16 samples to train and 0 to validate; allowed: at least one"),
        ("number % 2\n", "None\n", "model.source: collate raised TypeError"),
        (
            "number % 2\n",
            "0, 1\n",
            r"collate gave \(Tensor \(2, 5\), Tensor \(2,\), Tensor",
        ),
        ("self.numbers[place]", "self.numbers[99]", "sample 0 of the part train raised IndexError"),
        ('["even", "odd"]', "None", "got text-classification, but the dataset has no attribute"),
        ("number % 2\n", "number / 2\n", "targets are float64; allowed: int64 numbers of classes"),
        (
            "(self.width,)",
            "(self.width, len(self))",
            r"data: sample 0 of the part validation: inputs is Tensor \(5, 4\) float32, but "
            r"Tensor \(5, 16\) float32 in sample 0 of the part train; allowed: samples alike, or a",
        ),
        (
            "float(number))",
            "float(number) if number != 31 else torch.nan)",
            r"data: sample 11 of the part train: inputs: 5 of 5 values are NaN; allowed: finite "
            r"ones; data\.missing: keep permits NaN",
        ),
        (
            "(self.width,)",
            "(self.width - place // 7,)",
            r"data: sample \d+ of the part train: inputs is Tensor \([43],\) float32, but Tensor "
            r"\(5,\) float32 in sample 0 of the part train; allowed: samples alike, or a collate",
        ),
        (
            "number % 2\n",
            "None if number == 30 else number % 2\n",
            "data: sample 10 of the part train: targets is None, but a value of type int in sample",
        ),
        ("open(uri)", "open('/etc/shadow')", "raised (FileNotFound|Permission)Error"),
    ],
)
def test_a_source_that_reads_badly_gives_one_line(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in SOURCE
    with pytest.raises(BadInput, match=said) as caught:
        schema(tmp_path, SOURCE.replace(old, new), task="text-classification")
    assert "\n" not in str(caught.value)


OWN_COLLATE = """

def collate(samples):
    return torch.stack([one for one, _ in samples]), torch.tensor([two for _, two in samples])
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("(self.width,)", "(self.width, len(self))", "training and validation have different shap"),
        (
            "(self.width,)",
            "(self.width - (place == 1),)",
            r"model\.source: collate raised RuntimeError: .*; sample 1 of the part train: inputs "
            r"is Tensor \(4,\) float32, but Tensor \(5,\) float32 in sample 0 of the part train$",
        ),
    ],
)
def test_a_collate_of_the_source_says_itself_what_failed(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        schema(tmp_path, SOURCE.replace(old, new) + OWN_COLLATE)


def test_missing_values_may_be_kept_and_a_slow_source_is_looked_at_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCE.replace("float(number))", "float(number) if number != 31 else torch.nan)")
    assert schema(tmp_path, source, missing="keep").train_rows == 16
    data = reader(tmp_path)
    with pytest.raises(BadInput, match="sample 11 of the part train: inputs: 5 of 5"):
        model_schema.derived_schema(data, "")
    monkeypatch.setattr(model_schema, "_LOOK_S", 0.0)
    assert model_schema.derived_schema(data, "").train_rows == 16


def test_data_that_differs_from_the_validated_is_refused(tmp_path: Path) -> None:
    found = schema(tmp_path)
    (tmp_path / "numbers.txt").write_text("1\n2\n3\n4\n5\n6\n")
    with pytest.raises(BadInput, match="has 2 and 4 samples, but had 16 and 4 when it was validat"):
        reader(tmp_path, found)


def test_files_of_any_kind_may_be_read_and_their_content_counts(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"1")
    (folder / "deep" / "b").write_bytes(b"2")
    given = DataSpec(uri=str(folder), reader="model")
    spec = localized(given, doors.settings())
    before = content_sha256(spec)
    (folder / "deep" / "b").write_bytes(b"3")
    assert content_sha256(spec) != before
    with pytest.raises(BadInput, match=r"a folder without index\.csv"):
        localized(DataSpec(uri=str(folder)), doors.settings())
    with pytest.raises(BadInput, match=r"got builtin:digits; allowed with data\.reader: model: fi"):
        localized(DataSpec(uri="builtin:digits", reader="model"), doors.settings())
