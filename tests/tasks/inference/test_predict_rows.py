"""Predictions of stored models equal the training's own evaluation; wrong rows give one line."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Any

import doors
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import csv
from stored_run import stored_run, with_source

from trainwright.infra.s3_server import S3Access
from trainwright.tasks.data import dataset
from trainwright.tasks.errors import BadInput, CorruptArtefact
from trainwright.tasks.inference import csv_rows, predict, stored_model
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.job import DataSpec
from trainwright.tasks.storage.connect import open_store

MIXED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(2)
        self.out = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, inputs):
        numbers = self.norm(torch.nan_to_num(inputs["numbers"]))
        codes = self.codes(inputs["categories"]).flatten(1)
        return self.out(torch.cat([numbers, codes], 1))


def build_model():
    return Net()
"""
NUMBERS = """
def build_model():
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
"""
OWN = """
def predict(model, rows):
    values = torch.tensor([[a or 0.0, b or 0.0] for a, b in zip(rows["a"], rows["b"])])
    found = [round(one, 2) for one in model(values.float())[:, 0].tolist()]
    return {"prediction": found, "low": [one - 0.5 for one in found]}
"""
TEXTS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(2**20 + 2, 4, padding_idx=0)
        self.out = nn.Linear(4, 2)

    def forward(self, tokens):
        return self.out(self.bag(tokens))


def build_model():
    return Net()
"""
IMAGES = """
def build_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def mixed_table(rows: int = 400) -> pa.Table:
    """Numbers, texts and a class that follows from them; some values are missing."""
    random = np.random.default_rng(1)
    a, b = random.normal(size=rows), random.integers(0, 5, rows)
    colour = np.array(["red", "green", "blue"])[random.integers(0, 3, rows)]
    shape = np.array(["round", "square"])[random.integers(0, 2, rows)]
    label = np.where(colour == "red", "stop", np.where(a > 0, "go", "wait"))
    return pa.table(
        {
            "a": pa.array(a, mask=random.random(rows) < 0.1),
            "colour": pa.array(colour.tolist(), mask=random.random(rows) < 0.1),
            "b": b,
            "shape": shape.tolist(),
            "label": label.tolist(),
        }
    )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("mixed")
    pq.write_table(mixed_table(), folder / "train.parquet")
    data = {"uri": str(folder / "train.parquet"), "missing": "keep"}
    return stored_run(folder, MIXED, data, precision="amp")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("numbers")
    random = np.random.default_rng(2)
    a, b = random.normal(size=300), random.integers(0, 9, 300)
    pq.write_table(pa.table({"a": a, "b": b, "label": 3 * a + b / 9}), folder / "train.parquet")
    return stored_run(folder, NUMBERS, {"uri": str(folder / "train.parquet")})


def loaded(run: Run) -> dataset.Dataset:
    """A run's data with its split."""
    return dataset.load(run.job().data, run.job().train.seed)


def held_out(run: Run) -> pa.Table:
    """The validation rows of a run's table."""
    return pq.read_table(run.job().data.uri).take(pa.array(loaded(run).split.validation))


def write(folder: Path, **columns: Any) -> Path:
    path = folder / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def refusal(run: Run, rows: Path, out: Path) -> str:
    """The one line that refuses a prediction, of which nothing is left."""
    with pytest.raises(BadInput) as raised:
        predict(run, str(rows), str(out))
    message = str(raised.value)
    assert "\n" not in message
    assert not out.exists()
    assert list(out.parent.glob(".predictions-*")) == []
    return message


def test_predictions_of_mixed_columns_have_the_trainings_own_accuracy(
    mixed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_model, "CHUNK_ROWS", 33)  # several chunks, the last one smaller
    given = held_out(mixed)
    more = given.append_column("extra", pa.array(range(len(given))))
    rows, out = tmp_path / "rows.parquet", tmp_path / "out.parquet"
    pq.write_table(more.select(["extra", "shape", "b", "a", "colour"]), rows)
    found = predict(mixed, str(rows), str(out))
    assert (found.rows, found.ignored) == (len(given), ["extra"])
    assert found.columns == ["prediction", "probability"]
    predictions = pq.read_table(out)
    wanted = given["label"].to_pylist()
    right = np.array(predictions["prediction"].to_pylist()) == np.array(wanted)
    result = mixed.read(Result)
    assert right.mean() == result.metrics["accuracy"]
    assert found.model_step == result.model_step
    assert all(1 / 3 <= one <= 1 for one in predictions["probability"].to_pylist())
    # a CSV file of the same rows gives the same predictions; the target may be there
    csv.write_csv(given, tmp_path / "rows.csv")
    predict(mixed, str(tmp_path / "rows.csv"), str(tmp_path / "out.csv"))
    as_csv = csv.read_csv(tmp_path / "out.csv")
    assert as_csv["prediction"].to_pylist() == predictions["prediction"].to_pylist()


def test_values_that_training_did_not_see_are_predicted_as_missing_ones(
    mixed: Run, tmp_path: Path
) -> None:
    coded = pa.array(["mauve", None, "red"], pa.dictionary(pa.int8(), pa.string()))
    rows = write(tmp_path, a=[1.0] * 3, b=[2] * 3, colour=coded, shape=["round"] * 3)
    found = predict(mixed, str(rows), str(tmp_path / "out.parquet"))
    assert found.unseen == {"colour": 1}
    one, other, _ = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert one == other


def test_a_column_of_unseen_values_only_is_refused_unless_that_is_allowed(
    mixed: Run, tmp_path: Path
) -> None:
    """Numbers in a column of texts, mostly a mistake, are such values."""
    header, out = "a,b,colour,shape\n", tmp_path / "out.csv"
    (tmp_path / "rows.csv").write_text(header + "1,2,1,round\n2,3,2,round\n")
    assert refusal(mixed, tmp_path / "rows.csv", out) == (
        "rows: rows.csv: the column 'colour' has no value that the model is trained on: got '1' in "
        "its first row of 2; allowed: 'blue', 'green', 'red'; --allow-unseen predicts them as "
        "values that the model does not know"
    )
    rows = write(tmp_path, a=[1.0, 2.0], b=[2, 3], colour=[1, 2], shape=["round", "round"])
    says = refusal(mixed, rows, out)
    assert "'colour' holds whole numbers; the run's model takes texts; --allow-unseen" in says
    for given in (rows, tmp_path / "rows.csv"):
        found = predict(mixed, str(given), str(out), allow_unseen=True)
        assert (found.rows, found.unseen) == (2, {"colour": 2})


@pytest.fixture(scope="module")
def european(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on a file with semicolons, decimal commas, codes, and numbers beyond float32."""
    folder = tmp_path_factory.mktemp("european")
    rows = [
        f"{row % 7},5;{1_700_000_000_000 + row};00{row % 3};{'high' if row >= 200 else 'low'}\n"
        for row in range(400)
    ]
    (folder / "train.csv").write_text("a;stamp;zip;label\n" + "".join(rows))
    data = {"uri": str(folder / "train.csv"), "missing": "keep"}
    return stored_run(folder, MIXED.replace("nn.Linear(10,", "nn.Linear(6,"), data, epochs=30)


def test_a_csv_file_is_predicted_in_the_form_of_the_data(european: Run, tmp_path: Path) -> None:
    """Neighbouring time stamps beyond float32 stay apart, in training and prediction."""
    schema = european.read(Validation).data
    assert schema is not None
    stamp = next(column for column in schema.columns if column.name == "stamp")
    assert stamp.offset == 1_700_000_000_199
    assert european.read(Result).metrics["accuracy"] > 0.9
    lines = Path(european.job().data.uri).read_text().splitlines(keepends=True)
    held = [lines[1 + row] for row in loaded(european).split.validation]
    (tmp_path / "rows.csv").write_text(lines[0] + "".join(held))
    predict(european, str(tmp_path / "rows.csv"), str(tmp_path / "out.parquet"))
    predictions = pq.read_table(tmp_path / "out.parquet")["prediction"].to_pylist()
    wanted = [line.strip().rpartition(";")[2] for line in held]
    right = np.array(predictions) == np.array(wanted)
    assert right.mean() == european.read(Result).metrics["accuracy"]
    columns = [line.split(";") for line in held]
    rows = write(
        tmp_path,
        a=[float(one[0].replace(",", ".")) for one in columns],
        stamp=[int(one[1]) for one in columns],
        zip=[one[2] for one in columns],
    )
    predict(european, str(rows), str(tmp_path / "again.parquet"))
    again = pq.read_table(tmp_path / "again.parquet")
    assert again.equals(pq.read_table(tmp_path / "out.parquet"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a;zip\n0,5;001\n", "rows.csv has no column 'stamp'; the run's model takes a, stamp, zip"),
        ("a;stamp;zip\n0.5;1700000000000;001\n", "'a' holds '0.5'; its other numbers are written"),
        ("a;stamp;zip\nn/a;1700000000000;001\n", "'a' holds 'n/a'; its other numbers are"),
        (
            "a,stamp,zip\n1,n/a,001\n",
            "the column 'stamp' holds texts; the run's model takes numbers",
        ),
        ("a;stamp;zip\n", "rows: rows.csv has no rows"),
    ],
)
def test_csv_rows_in_another_form_are_refused(
    european: Run, tmp_path: Path, content: str, says: str
) -> None:
    (tmp_path / "rows.csv").write_text(content)
    assert says in refusal(european, tmp_path / "rows.csv", tmp_path / "out.csv")


def test_predicted_numbers_have_the_trainings_own_error(numbers: Run, tmp_path: Path) -> None:
    given = held_out(numbers)
    pq.write_table(given, tmp_path / "rows.parquet")
    predict(numbers, str(tmp_path / "rows.parquet"), str(tmp_path / "out.parquet"))
    found = pq.read_table(tmp_path / "out.parquet")["prediction"].to_numpy().astype(np.float64)
    error = np.abs(found - given["label"].to_numpy().astype(np.float32)).mean()
    assert error == pytest.approx(numbers.read(Result).metrics["mae"], rel=1e-6)


def test_columns_of_a_csv_file_are_read_as_the_model_takes_them(
    numbers: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_rows, "_BLOCK_BYTES", 1000)
    rows = "".join(f"{n % 7},{n % 3}\n" for n in range(2000)) + "0.5,1.25\n"
    (tmp_path / "rows.csv").write_text("b,a\n" + rows)  # fractions only after the first block
    found = predict(numbers, str(tmp_path / "rows.csv"), f"file://{tmp_path}/out.parquet")
    assert found.rows == pq.read_metadata(tmp_path / "out.parquet").num_rows == 2001
    (tmp_path / "empty.csv").write_text("a,b\n,1\n")
    assert refusal(numbers, tmp_path / "empty.csv", tmp_path / "no.csv") == (
        "rows: empty.csv: the column 'a' has no value in row 0 (from 0); allowed: a value, as in "
        "the run's data"
    )


def test_arrays_are_predicted_as_the_training_evaluated_them(tmp_path: Path) -> None:
    run = stored_run(tmp_path, IMAGES, {"uri": "builtin:digits"}, label_smoothing=0.1)
    found = loaded(run)
    rows = found.split.validation
    np.savez(tmp_path / "rows.npz", images=found.inputs["inputs"][rows])
    predict(run, str(tmp_path / "rows.npz"), str(tmp_path / "out.parquet"))
    predictions = pq.read_table(tmp_path / "out.parquet")["prediction"].to_pylist()
    right = np.array(predictions) == found.targets[rows].astype(str)
    assert right.mean() == run.read(Result).metrics["accuracy"]
    for arrays, says in (
        ({"images": np.zeros((3, 1, 4, 4))}, "shape (1, 4, 4); the run's model takes (1, 8, 8)"),
        ({"a": rows, "b": rows}, "rows.npz has no array 'inputs'; allowed: the inputs of the run"),
        (
            {"images": np.repeat([[0.0, np.inf]], 32, axis=1).reshape(1, 1, 8, 8)},
            "the array 'images' has an infinite number in row 0 (from 0)",
        ),
        ({"images": np.array(["x"])}, "the array 'images' holds <U1; allowed: numbers, by row"),
    ):
        np.savez(tmp_path / "rows.npz", **arrays)  # type: ignore[arg-type]
        assert says in refusal(run, tmp_path / "rows.npz", tmp_path / "no.parquet")
    says = refusal(run, write(tmp_path, a=[1.0]), tmp_path / "no.parquet")
    assert "takes no columns of a table; allowed: .npz with the arrays inputs" in says


def test_texts_are_predicted_as_the_training_evaluated_them(tmp_path: Path) -> None:
    random, words = np.random.default_rng(0), ["good", "bad", "film", "plot", "the", "a", "of"]
    texts = [" ".join(random.choice(words, size)) for size in random.integers(4, 20, 200)]
    labels = ["yes" if text.count("good") > text.count("bad") else "no" for text in texts]
    pq.write_table(pa.table({"said": texts, "label": labels}), tmp_path / "train.parquet")
    data = {"uri": str(tmp_path / "train.parquet"), "task": "text-classification"}
    run = stored_run(tmp_path, TEXTS, data)
    given = held_out(run)
    pq.write_table(given.select(["said"]), tmp_path / "rows.parquet")
    predict(run, str(tmp_path / "rows.parquet"), str(tmp_path / "out.parquet"))
    predictions = pq.read_table(tmp_path / "out.parquet")["prediction"].to_pylist()
    right = np.array(predictions) == np.array(given["label"].to_pylist())
    assert right.mean() == run.read(Result).metrics["accuracy"]


def test_a_sources_own_predict_gets_raw_columns(numbers: Run, tmp_path: Path) -> None:
    run = with_source(numbers, tmp_path, NUMBERS + OWN)
    rows, out = write(tmp_path, b=[1, None], a=[0.5, None]), tmp_path / "out.parquet"
    found = predict(run, str(rows), str(out))
    assert found.columns == ["prediction", "low"]
    predictions = pq.read_table(out)
    for one, low in zip(*(predictions[name].to_pylist() for name in found.columns), strict=True):
        assert one == round(one, 2)
        assert low == one - 0.5
    # values that training refuses never reach it
    with pytest.raises(BadInput, match="'a' has an infinite number in row 1"):
        predict(run, str(write(tmp_path, a=[0.5, float("-inf")], b=[1, 2])), str(out))
    write(tmp_path, b=[1, None], a=[0.5, None])
    # predictions may be replaced by predictions, and by nothing else
    predict(run, str(rows), str(out))
    mine = {"notes.csv": "mine", "dates.csv": "prediction date,a\n1,2\n"}
    for name, content in mine.items():
        (tmp_path / name).write_text(content)
    for kept in ("rows.parquet", *mine):
        with pytest.raises(BadInput, match="exists and holds no predictions"):
            predict(run, str(rows), str(tmp_path / kept))
    assert all((tmp_path / name).read_text() == content for name, content in mine.items())


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"a": [1.0]}, "rows: rows.parquet has no column 'b'; the run's model takes a, b"),
        (
            {"a": ["x"], "b": [1]},
            "rows: rows.parquet: the column 'a' holds texts; the run's model takes numbers",
        ),
        ({"a": [1.0, float("nan")], "b": [1, 2]}, "the column 'a' has no value in row 1 (from 0)"),
        ({"a": [1.0, 1e300], "b": [1, 2]}, "the column 'a' has an infinite number in row 1"),
        ({"a": [1.0], "b": pa.array([None], pa.int64())}, "'b' has no value in row 0"),
        ({"a": [], "b": []}, "rows: rows.parquet has no rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_one_line(
    numbers: Run, tmp_path: Path, columns: dict[str, Any], says: str
) -> None:
    assert says in refusal(numbers, write(tmp_path, **columns), tmp_path / "out.parquet")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rows.txt", "rows: got "),
        ("nothing.csv", "there is no such file"),
        ("bad.parquet", "rows: bad.parquet can't be read: "),
        ("bad.csv", "rows: bad.csv can't be read: "),
        ("twice.csv", "the column 'a' occurs twice"),
        ("empty.csv", "rows: empty.csv can't be read: "),
        ("bad.npz", "rows: bad.npz can't be read: "),
    ],
)
def test_files_that_are_no_tables_are_refused_with_one_line(
    numbers: Run, tmp_path: Path, name: str, says: str
) -> None:
    contents = {"bad.parquet": "PAR1", "bad.csv": "a,b\n1,2\n3\n", "twice.csv": "a,a,b\n1,2,3\n"}
    if name != "nothing.csv":
        (tmp_path / name).write_text(contents.get(name, ""))
    assert says in refusal(numbers, tmp_path / name, tmp_path / "out.csv")


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("nowhere/out.csv", "there is no folder "),
        ("out.txt", "allowed: a file that ends in .parquet or .csv"),
        ("ftp://a/out.csv", "allowed: a path, file://… or s3://…"),
        ("folder.csv", "is not a regular file"),
        ("s3://out.csv", "allowed: s3://bucket/key"),
    ],
)
def test_outputs_that_can_not_be_written_are_refused_with_one_line(
    numbers: Run, tmp_path: Path, out: str, says: str
) -> None:
    rows = write(tmp_path, a=[1.0], b=[1])
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(BadInput) as raised:
        predict(numbers, str(rows), out if "://" in out else str(tmp_path / out))
    assert str(raised.value).startswith("--out: ")
    assert says in str(raised.value)


def test_a_run_that_is_not_finished_or_damaged_is_refused(numbers: Run, tmp_path: Path) -> None:
    run = with_source(numbers, tmp_path, NUMBERS)
    rows, out = write(tmp_path, a=[1.0], b=[1]), tmp_path / "out.csv"
    for key in ("model/model.safetensors", "model/source/net.py", "validation.json"):
        content = run.objects.get(key)
        run.objects.delete(key)
        with pytest.raises(CorruptArtefact, match=f"{key}: missing"):
            predict(run, str(rows), str(out))
        run.objects.put(key, content + b"#")
        with pytest.raises(CorruptArtefact, match=f"{key}: changed since it was sealed"):
            predict(run, str(rows), str(out))
        run.objects.put(key, content)
    run.objects.delete("manifest.json")
    run = doors.run_at(run.uri)
    refused = refusal(run, rows, out)
    assert "is trained, but its model is not stored" in refused
    assert "`trainwright run JOB` with its job stores it" in refused
    run.objects.delete("result.json")
    assert "is not finished: it has no manifest.json" in refusal(run, rows, out)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_package\n" + NUMBERS, "No module named 'no_such_package'"),
        (NUMBERS.replace("Linear(2, 8)", "Linear(2, 8, bias=False)"), "weights do not fit: "),
        (
            NUMBERS + "def predict(model, rows): return {'prediction': rows['c']}\n",
            "model: predict raised KeyError: 'c'",
        ),
        (
            NUMBERS + "def predict(model, rows): return {'prediction': [1.0]}\n",
            "model: predict returned 1 values of 'prediction' for 2 rows",
        ),
        (
            NUMBERS + "def predict(model, rows): return [1.0, 2.0]\n",
            "model: predict returned a list; allowed: lists by name, one `prediction`",
        ),
        (
            NUMBERS + "def predict(model, rows): return {'prediction': 1.0}\n",
            "model: predict returned a float for 'prediction'; allowed: a list of values",
        ),
        (
            NUMBERS + "def predict(model, rows): return {'prediction': ['a', 1.0]}\n",
            "not all texts, numbers or lists of numbers",
        ),
    ],
)
def test_a_model_that_can_not_predict_gives_one_line(
    numbers: Run, tmp_path: Path, code: str, says: str
) -> None:
    run = with_source(numbers, tmp_path, code)
    assert says in refusal(run, write(tmp_path, a=[1.0, 2.0], b=[1, 2]), tmp_path / "out.csv")


def test_rows_and_predictions_may_be_in_s3(
    numbers: Run, s3: S3Access, home: Path, tmp_path: Path
) -> None:
    run = doors.run_at(numbers.uri)
    store = open_store("s3://predict-rows/batch", run.settings)
    store.put_file("rows.parquet", write(tmp_path, a=[1.0, 2.0], b=[3, 4]))
    predict(run, f"{store.uri}/rows.parquet", f"{store.uri}/out.parquet")
    store.get_file("out.parquet", tmp_path / "out.parquet")
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == 2
    store.put_file("rows.parquet", write(tmp_path, a=[1.0]))
    with pytest.raises(BadInput, match="has no column 'b'"):
        predict(run, f"{store.uri}/rows.parquet", f"{store.uri}/no.parquet")
    assert {one.key for one in store.list()} == {"rows.parquet", "out.parquet"}
    rows = write(tmp_path, a=[1.0], b=[3])
    predict(run, str(rows), f"{store.uri}/out.parquet")  # again
    with pytest.raises(BadInput, match=r"/rows\.parquet exists and holds no predictions"):
        predict(run, str(rows), f"{store.uri}/rows.parquet")


def test_lists_become_columns_of_a_csv_file(numbers: Run, tmp_path: Path) -> None:
    code = (
        "def predict(model, rows): return {'prediction': [[a, b] for a, b in zip(*rows.values())]}"
    )
    run = with_source(numbers, tmp_path, NUMBERS + code)
    rows = write(tmp_path, a=[1.0, 2.0], b=[3, 4])
    predict(run, str(rows), str(tmp_path / "out.csv"))
    found = csv.read_csv(tmp_path / "out.csv").to_pydict()
    assert found == {"prediction_1": [1.0, 2.0], "prediction_2": [3.0, 4.0]}


def test_a_folder_of_parquet_files_is_predicted_as_one_table(
    mixed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, folder = held_out(mixed), tmp_path / "rows"
    (folder / "later").mkdir(parents=True)
    pq.write_table(given, tmp_path / "rows.parquet")
    pq.write_table(given.slice(0, 50), folder / "a.parquet")
    pq.write_table(given.slice(50), folder / "later" / "b.parquet")
    (folder / "notes.txt").write_text("not rows")
    monkeypatch.setattr(stored_model, "CHUNK_ROWS", 33)
    predict(mixed, str(tmp_path / "rows.parquet"), str(tmp_path / "one.parquet"))
    found = predict(mixed, f"file://{folder}", str(tmp_path / "many.parquet"))
    assert (found.rows, found.ignored) == (len(given), [])
    assert pq.read_table(tmp_path / "many.parquet").equals(pq.read_table(tmp_path / "one.parquet"))
    pq.write_table(given.drop_columns("b"), folder / "later" / "c.parquet")
    says = refusal(mixed, folder, tmp_path / "no.parquet")
    assert "later/c.parquet and the files before it differ in the column 'b'" in says
    (tmp_path / "none").mkdir()
    says = refusal(mixed, tmp_path / "none", tmp_path / "no.parquet")
    assert says == (
        "rows: got none, a folder without parquet files; allowed: a folder of them, or a .parquet "
        "or .csv file"
    )


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on a folder of images in a subfolder for each class, with an index."""
    folder, images = tmp_path_factory.mktemp("digits"), read_digits()
    lines = ["file,label"]
    for number, (image, label) in enumerate(zip(*images, strict=True)):
        name = f"{label}/{number}.png"
        (folder / "images" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / "images" / name)
        lines.append(f"{name},{label}")
    (folder / "images" / "index.csv").write_text("\n".join(lines))
    return stored_run(folder, IMAGES, {"uri": str(folder / "images"), "missing": "keep"})


def read_digits(count: int = 300) -> tuple[list[Any], list[int]]:
    """Handwritten digits, uint8 (8, 8), and their classes."""
    found = dataset.load(DataSpec(uri="builtin:digits"))
    pixels = (255 * np.asarray(found.inputs["inputs"][:count, 0])).astype(np.uint8)
    return list(pixels), np.asarray(found.targets[:count]).tolist()


def test_a_folder_of_images_has_the_trainings_own_accuracy(
    digits: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_model, "CHUNK_ROWS", 17)
    images = Path(digits.job().data.uri)
    index = csv.read_csv(images / "index.csv").take(pa.array(loaded(digits).split.validation))
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, name in enumerate(index["file"].to_pylist()):
        shutil.copy(images / name, flat / f"{number:03}.{'PNG' if number % 2 else 'png'}")
    (flat / "notes.txt").write_text("not an image")
    found = predict(digits, str(flat), str(tmp_path / "out.csv"))
    assert found.columns == ["prediction", "probability", "file"]
    predictions = csv.read_csv(tmp_path / "out.csv")
    assert predictions["file"].to_pylist() == sorted(one.name for one in flat.glob("0*"))
    right = np.array(predictions["prediction"]) == np.array(index["label"])
    assert right.mean() == digits.read(Result).metrics["accuracy"]
    # an index gives the order; subfolders do not count
    predict(digits, str(images), str(tmp_path / "all.parquet"))
    every = pq.read_table(tmp_path / "all.parquet")
    assert every["file"].to_pylist() == csv.read_csv(images / "index.csv")["file"].to_pylist()


def test_a_sources_own_predict_gets_images(digits: Run, tmp_path: Path) -> None:
    code = """
    def predict(model, rows):
        [(name, images)] = rows.items()
        kinds = [f"{name} {tuple(one.shape)} {one.dtype} {int(one.max())}" for one in images]
        return {"prediction": kinds}
    """
    run, folder = with_source(digits, tmp_path, IMAGES + textwrap.dedent(code)), tmp_path / "rows"
    folder.mkdir()
    Image.new("RGB", (20, 30), (255, 255, 255)).save(folder / "large.jpg")
    predict(run, str(folder), str(tmp_path / "out.parquet"))
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [
        {"prediction": "image (1, 8, 8) torch.uint8 255", "file": "large.jpg"}
    ]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "rows: got rows, a folder without images; allowed: .jpg, .jpeg, .png files, or an "),
        ({"a.png": "no image"}, "a.png can't be read as an image"),
        ({"index.csv": "name\na.png\n"}, "rows: rows/index.csv has no column 'file'"),
        ({"index.csv": "file\nb.png\n"}, "rows: rows/index.csv names 'b.png'; allowed: files"),
        ({"index.csv": "file\n../out.csv\n"}, "rows: rows/index.csv names '../out.csv'; allowed"),
        ({"index.csv": "file\na.png,1\n"}, "rows: index.csv can't be read: "),
    ],
)
def test_folders_of_images_that_can_not_be_read_are_refused_with_one_line(
    digits: Run, tmp_path: Path, files: dict[str, str], says: str
) -> None:
    (tmp_path / "rows").mkdir()
    for name, content in files.items():
        (tmp_path / "rows" / name).write_text(content)
    found = refusal(digits, tmp_path / "rows", tmp_path / "no.csv")
    assert found.startswith("rows: ")
    assert says in found


def test_folders_may_be_in_s3(
    numbers: Run, digits: Run, s3: S3Access, home: Path, tmp_path: Path
) -> None:
    table = write(tmp_path, a=[1.0, 2.0], b=[3, 4])
    run = doors.run_at(numbers.uri)
    store = open_store("s3://predict-rows/folders", run.settings)
    for name in ("tables/a.parquet", "tables/b/c.parquet"):
        store.put_file(name, table)
    found = predict(run, f"{store.uri}/tables", str(tmp_path / "out.parquet"))
    assert found.rows == 4
    Image.new("L", (8, 8)).save(tmp_path / "black.png")
    store.put_file("images/3/black.png", tmp_path / "black.png")
    predict(doors.run_at(digits.uri), f"{store.uri}/images", str(tmp_path / "images.parquet"))
    assert pq.read_table(tmp_path / "images.parquet")["file"].to_pylist() == ["3/black.png"]
