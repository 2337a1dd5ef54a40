"""Exports of finished runs to ONNX: the files, what they compute, and what is refused."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pyarrow.parquet as pq
import pytest
import torch
from finished_run import begin_run, local_path
from stored_run import stored_run, with_source
from table_run import BRANCHES, MODEL, RARE, ROWS, table_run

from trainwright.tasks import progress
from trainwright.tasks.data import dataset
from trainwright.tasks.errors import (
    BadInput,
    CorruptArtefact,
    NotInstalled,
    RunHeld,
    TrainwrightError,
)
from trainwright.tasks.export.export_run import export_run
from trainwright.tasks.inference import predict
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.runs.artefacts.export_report import ExportReport
from trainwright.tasks.runs.exports import sealed_exports
from trainwright.tasks.runs.run import Run
from trainwright.tasks.store import load_model, verify

IMAGES = """
def build_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
FILES = {"model.onnx", "report.json", "report.html", "README.md", "example.csv", "example.npz"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return table_run(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def out(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy of the run's export."""
    folder = tmp_path_factory.mktemp("export") / "onnx"
    export_run(run, "onnx", out=folder)
    return folder


@pytest.fixture
def model(out: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(out / "model.onnx"))


def test_an_export_is_a_sealed_folder_of_the_run_which_stays_sealed(run: Run, out: Path) -> None:
    assert {path.name for path in out.iterdir()} == FILES | {"manifest.json"}
    sealed = run.objects.get("export/onnx/manifest.json")
    assert (out / "manifest.json").read_bytes() == sealed
    manifest = json.loads(sealed)
    for name in FILES:
        stored = run.objects.get(f"export/onnx/{name}")
        assert stored == (out / name).read_bytes()
        assert manifest["files"][name]["sha256"] == sha256(stored).hexdigest()
    assert set(manifest["files"]) == FILES
    verify(run)
    [report] = sealed_exports(run)
    assert report == ExportReport.model_validate_json((out / "report.json").read_text())
    assert (report.kind, report.run, set(report.files)) == ("onnx", run.uri, FILES)


def test_the_report_compares_with_the_trained_model_on_all_validation_rows(out: Path) -> None:
    report = ExportReport.model_validate_json((out / "report.json").read_text())
    assert report.rows == ROWS // 5
    assert report.max_error <= 1e-5
    assert report.agreement == 1.0
    assert report.metric == "accuracy"
    assert report.metrics.exported == report.metrics.trained
    assert report.latency_s is not None
    assert report.latency_s.exported.low <= report.latency_s.exported.median


def test_a_row_gives_what_predict_gives_for_its_raw_columns(
    run: Run, model: onnxruntime.InferenceSession, tmp_path: Path
) -> None:
    table = pq.read_table(run.job().data.uri)
    predict(run, run.job().data.uri, str(tmp_path / "predicted.parquet"))
    wanted = pq.read_table(tmp_path / "predicted.parquet")
    rows = {
        "a": table["a"].to_numpy().astype(np.float32),
        "output": table["output"].to_numpy().astype(np.float32),
        "colour": np.array([one or "" for one in table["colour"].to_pylist()], dtype=object),
    }
    label, probability = model.run(["label", "probability"], rows)
    assert label.tolist() == wanted["prediction"].to_pylist()
    np.testing.assert_allclose(probability, wanted["probability"].to_numpy(), rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 257])
def test_any_number_of_rows_is_allowed(model: onnxruntime.InferenceSession, size: int) -> None:
    rows = {
        "a": np.full(size, np.nan, np.float32),
        "output": np.zeros(size, np.float32),
        "colour": np.array(["never seen"] * size, dtype=object),
    }
    output, label, probability = model.run(None, rows)
    assert output.shape == (size, 2)
    assert label.shape == probability.shape == (size,)
    np.testing.assert_array_equal(output, output[:1].repeat(size, 0))


def test_the_file_says_where_it_is_from_and_names_no_path_of_this_machine(
    run: Run, out: Path
) -> None:
    proto = onnx.load(out / "model.onnx")
    said = {one.key: one.value for one in proto.metadata_props}
    assert said["run"] == run.uri
    assert said["data_sha256"] == run.data().sha256
    assert json.loads(said["classes"]) == run.data().classes
    assert set(json.loads(said["inputs"])) == {"a", "output", "colour"}
    content = (out / "model.onnx").read_bytes()
    assert b"site-packages" not in content
    assert b"net.py" not in content
    assert [one.name for one in proto.graph.output] == ["output_", "label", "probability"]


def test_the_page_loads_nothing_and_shows_the_pipeline(out: Path) -> None:
    text = (out / "report.html").read_text()
    assert "<svg" in text
    assert "Gemm" in text
    assert "src=" not in text
    assert set(re.findall(r'href="([^"]*)"', text)) == FILES
    opsets = {one.domain: one.version for one in onnx.load(out / "model.onnx").opset_import}
    assert f"ONNX opset {opsets['']}" in text


def programs(folder: Path) -> list[Path]:
    """The programs of a README, written to its folder."""
    found = []
    for text in re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL):
        name = re.match(r"# (\w+\.py):", text)
        assert name is not None, text
        (folder / name[1]).write_text(text)
        found.append(folder / name[1])
    return found


def test_the_programs_of_the_readme_run(out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in out.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    rows, file, serve = programs(folder)
    printed = _output(rows).splitlines()
    found = [line.split(maxsplit=1) for line in printed[::2]]
    assert [name for name, _ in found] == ["output_", "label", "probability"]
    for (_, text), line in zip(found, printed[1::2], strict=True):
        assert line == f"expected {text}"
    lines = _output(file).splitlines()
    with np.load(folder / "example.npz") as example:
        columns = [example[name].tolist() for name in ("a", "output", "colour")]
        assert len(set(map(str, zip(*columns, strict=True)))) == 3
        labels = [line.split(",")[-2] for line in lines[1:]]
        assert labels == example["label"].tolist()
    assert lines[0] == "output_,label,probability"
    assert len(lines) == 4
    (folder / "other.csv").write_text("a,b\n1,2\n")
    refused = subprocess.run(
        [sys.executable, file.name, "other.csv"], cwd=folder, capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert refused.stderr == "other.csv: has no columns output, colour, which the model reads\n"
    with subprocess.Popen(
        [sys.executable, serve.name, "0"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        address = server.stdout.readline().strip()
        given = {"a": [1.0, None], "output": [0.0, 0.0], "colour": ["red", "never seen"]}
        answer = _post(address, given)
        for body in (b"no JSON", b"\xff", b"[1]", b""):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(address, body, timeout=60)
            assert refused.value.code == 400
            assert "error" in json.load(refused.value)
        server.terminate()
        assert "Traceback" not in server.stderr.read()
    assert len(answer["label"]) == 2
    assert set(answer["label"]) <= {"low", "high"}


def test_the_example_of_arrays_is_rows_of_the_validation_data(tmp_path: Path) -> None:
    run = stored_run(tmp_path, IMAGES, {"uri": "builtin:digits", "target": "label"}, epochs=1)
    export_run(run, "onnx", out=tmp_path / "out")
    rows, *_ = programs(tmp_path / "out")
    printed = _output(rows).splitlines()
    data = dataset.load(run.job().data, run.job().train.seed)
    inputs, _ = data.batch(data.split.validation[:3])
    [(name, wanted)] = inputs.items()
    with np.load(tmp_path / "out/example.npz") as example:
        np.testing.assert_array_equal(example[name], wanted)
        assert printed[2] == f"label {example['label'].tolist()}"
        torch.set_default_dtype(torch.float32)
        trained = load_model(run.uri, tmp_path / "model", run.settings)
        exact = trained(torch.from_numpy(wanted).float()).detach().numpy()
        np.testing.assert_allclose(example["output"], exact, rtol=1e-4, atol=1e-5)


def _output(program: Path) -> str:
    done = subprocess.run(
        [sys.executable, program.name], cwd=program.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _post(address: str, rows: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(address, json.dumps(rows).encode(), timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_outputs_are_those_of_torch(
    run: Run, model: onnxruntime.InferenceSession, tmp_path: Path
) -> None:
    torch.set_default_dtype(torch.float32)
    trained = load_model(run.uri, tmp_path, run.settings)
    numbers = np.array([[1.0, 2.0], [np.nan, -3.0]], np.float32)
    names = run.data().columns
    wanted = trained({"numbers": torch.from_numpy(numbers), "categories": torch.tensor([[0], [1]])})
    order = [one.name for one in names if one.kind == "number"]
    texts = json.loads(run.objects.get("vocabulary.json"))["names"]["colour"]
    rows = {name: numbers[:, place] for place, name in enumerate(order)}
    rows["colour"] = np.array(["", texts[0]], dtype=object)
    [output] = model.run(["output_"], rows)
    np.testing.assert_allclose(output, wanted.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_int8_takes_the_same_rows_and_stays_within_the_tolerance(
    run: Run, out: Path, tmp_path: Path
) -> None:
    report = export_run(run, "onnx-int8", out=tmp_path / "int8", tolerance=0.02)
    before = ExportReport.model_validate_json((out / "report.json").read_text())
    assert (report.kind, report.tolerance) == ("onnx-int8", 0.02)
    assert report.inputs == before.inputs
    choice = "the validation rows of these figures are also those by which layers in float"
    assert report.notes[-1].startswith(choice)
    assert choice in (tmp_path / "int8" / "report.html").read_text()
    assert not any(choice in one for one in before.notes)
    assert report.metrics.exported >= before.metrics.exported - 0.02
    assert report.agreement >= 0.95
    assert report.operations["DequantizeLinear"] > 0
    assert report.size_bytes is not None
    assert before.size_bytes is not None
    assert report.size_bytes.float == before.size_bytes.exported
    assert [one.kind for one in sealed_exports(run)] == ["onnx", "onnx-int8"]
    rows = {
        "a": np.zeros(3, np.float32),
        "output": np.ones(3, np.float32),
        "colour": np.array(["red", "", "green"], dtype=object),
    }
    paths = (out / "model.onnx", tmp_path / "int8" / "model.onnx")
    exact, close = (
        onnxruntime.InferenceSession(str(path)).run(["output_"], rows)[0] for path in paths
    )
    np.testing.assert_allclose(close, exact, atol=0.1 * np.abs(exact).max())


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (BRANCHES, r"model: gate \(Gate\) can't be exported: .*net\.py, line .*x\.sum\(\) > 0"),
        (RARE, r"model: square \(Square\) uses the operation prims\.bessel_i1e, which ONNX has no"),
        ("import no_such_package\n", r"no_such_package"),
    ],
    ids=["branch on values", "operation that ONNX lacks", "missing package"],
)
def test_a_model_that_cannot_be_exported_is_refused_in_one_line(
    run: Run, tmp_path: Path, source: str, says: str
) -> None:
    copy = with_source(run, tmp_path, source)
    with pytest.raises(BadInput) as refused:
        export_run(copy, "onnx")
    assert re.search(says, str(refused.value)), refused.value
    assert "\n" not in str(refused.value)


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    unfinished = begin_run(f"file://{tmp_path}/store", "unfinished", 1)
    with pytest.raises(
        BadInput,
        match=r"not finished: it has no manifest\.json; `trainwright run JOB` continues it",
    ):
        export_run(unfinished, "onnx")


def test_a_damaged_run_is_refused(run: Run, tmp_path: Path) -> None:
    copy = with_source(run, tmp_path, BRANCHES)
    weights = local_path(copy, "model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptArtefact, match=r"model/model\.safetensors"):
        export_run(copy, "onnx")


def test_two_exports_of_a_run_to_one_kind_exclude_each_other(run: Run, tmp_path: Path) -> None:
    copy = with_source(run, tmp_path, MODEL)
    ledger = Ledger(copy.settings.ledger_url)
    other, resource = Holder("pid 1 on elsewhere"), f"export onnx {copy.uri}"
    ledger.take([resource], other, copy.uri)
    line = rf"export: pid 1 on elsewhere exports {copy.uri} to onnx; wait until it is done"
    with pytest.raises(RunHeld, match=line):
        export_run(copy, "onnx")
    assert not list(copy.objects.list("export/onnx/"))
    ledger.release(copy.uri, [resource])
    export_run(copy, "onnx")
    assert ledger.holder_of(resource) is None


def test_an_export_whose_lease_another_process_took_over_stores_nothing(
    run: Run, tmp_path: Path
) -> None:
    copy = with_source(run, tmp_path, MODEL)
    ledger, resource = Ledger(copy.settings.ledger_url), f"export onnx {copy.uri}"

    def take_over(event: progress.Event) -> None:
        if event.get("doing") == "converts and compares":
            ledger.release(copy.uri, [resource])
            ledger.take([resource], Holder("pid 1 on elsewhere"), copy.uri)

    with progress.listening(take_over), pytest.raises(RunHeld, match="another process began to"):
        export_run(copy, "onnx")
    assert not list(copy.objects.list("export/onnx/"))
    assert ledger.holder_of(resource) == Holder("pid 1 on elsewhere")


def test_a_folder_that_is_not_empty_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"--out: .* is not empty; choose another folder"):
        export_run(run, "onnx", out=tmp_path)
    with pytest.raises(BadInput, match=r"--out: .* is not a folder"):
        export_run(run, "onnx", out=tmp_path / "mine.txt")
    with pytest.raises(BadInput, match=r"--out: .*there is no folder"):
        export_run(run, "onnx", out=tmp_path / "nowhere" / "else")


@pytest.mark.parametrize("there", [True, False])
def test_a_disk_that_is_full_is_one_line_and_no_part_of_a_copy(
    run: Run, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, copied = tmp_path / "out", list[str]()
    if there:
        out.mkdir()
    copy = shutil.copyfile

    def full(source: Path, target: Path) -> None:
        if len(copied) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        copy(source, target)
        copied.append(target.name)

    monkeypatch.setattr(shutil, "copyfile", full)
    line = (
        rf"^--out: {out} can't be written .No space left on device.; the export is in file:.*onnx$"
    )
    with pytest.raises(TrainwrightError, match=line) as raised:
        export_run(run, "onnx", out=out)
    assert raised.value.exit_code == 1
    assert [*tmp_path.iterdir()] == [out] * there
    assert not there or [*out.iterdir()] == []


def test_a_full_temporary_folder_is_named_by_its_own_setting(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as there:
        there.setattr(Path, "write_bytes", full)
        with pytest.raises(TrainwrightError, match=r"^TMPDIR: .*No space left.*set TMPDIR"):
            export_run(run, "onnx")
    usage = shutil.disk_usage
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: usage(path)._replace(free=0 if "-export-" in str(path) else 2**40),
    )
    with pytest.raises(TrainwrightError, match=r"^TMPDIR: the data needs .* 0 B are free"):
        export_run(run, "onnx")


def test_a_folder_that_is_there_and_empty_gets_the_copy(run: Run, tmp_path: Path) -> None:
    export_run(run, "onnx", out=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"manifest.json"}


def test_an_unknown_kind_is_refused(run: Run) -> None:
    with pytest.raises(BadInput, match="--to: got 'tflite'; allowed: onnx, onnx-int8, rtl"):
        export_run(run, "tflite")


@pytest.mark.parametrize("tolerance", [1.0, -0.1, float("nan")])
def test_a_tolerance_that_no_job_may_have_is_refused(run: Run, tolerance: float) -> None:
    with pytest.raises(BadInput, match=rf"export: tolerance: got {tolerance}; allowed: "):
        export_run(run, "onnx-int8", tolerance=tolerance)


@pytest.mark.parametrize(
    ("kind", "package"), [("onnx", "onnxruntime"), ("onnx-int8", "onnxscript"), ("rtl", "da4ml")]
)
def test_without_the_packages_the_error_says_how_to_install_them(
    run: Run, kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else there(name)
    )
    with pytest.raises(
        NotInstalled, match=rf"{package}; install the extra `export` .*'\.\[export\]'"
    ):
        export_run(run, kind)


@pytest.fixture
def changed_data(run: Run) -> Iterator[None]:
    """The run's data with one row less, for the time of a test."""
    path = Path(run.job().data.uri)
    content = path.read_bytes()
    pq.write_table(pq.read_table(path).slice(1), path)
    yield
    path.write_bytes(content)


@pytest.mark.usefixtures("changed_data")
def test_data_that_has_changed_since_the_run_is_refused(run: Run) -> None:
    with pytest.raises(BadInput, match=r"table\.parquet has changed since the run"):
        export_run(run, "onnx")
