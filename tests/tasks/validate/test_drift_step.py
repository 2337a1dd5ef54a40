"""Drift in the step `validate` and its command, with the real Great Expectations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import doors
import numpy as np
import pytest
from command_line import run
from typer.testing import CliRunner

from trainwright.tasks import progress
from trainwright.tasks.cli.main import app
from trainwright.tasks.errors import BadInput, DataRejected
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.job import load_job
from trainwright.tasks.store import seal
from trainwright.tasks.validate.step import validate_data


@pytest.fixture
def store(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = (tmp_path / "store").as_uri()
    monkeypatch.setenv("TRAINWRIGHT_STORE", uri)
    return uri


def write_csv(path: Path, seed: int, shift: float = 0.0) -> None:
    """Two columns of numbers, of which `a` is shifted, a text, and two classes."""
    random = np.random.default_rng(seed)
    a, b = random.normal(shift, 1, 2_000), random.random(2_000)
    colours, labels = random.choice(["red", "blue"], 2_000), random.integers(0, 2, 2_000)
    lines = [f"{a[n]:.6f},{b[n]:.6f},{colours[n]},{labels[n]}" for n in range(2_000)]
    path.write_text("\n".join(["a,b,colour,label", *lines]) + "\n")


def validated_run(folder: Path, **data: Any) -> Run:
    """A new run of the job `x` that did the step `validate`."""
    source = {"uri": str(folder / "data.csv"), **data}
    job = load_job({"name": "x", "data": source})
    opened = doors.open_for(job, Holder("me"), new=True)
    try:
        doors.do(opened, "validate")
    finally:
        doors.ledger().release(opened.uri)
    return opened


def succeeded(done: Run) -> str:
    seal(done)
    done.note(state="success")
    return done.uri


def test_a_second_run_with_shifted_data_warns_fails_or_ignores_it(
    store: str, tmp_path: Path
) -> None:
    heard: list[dict[str, Any]] = []
    write_csv(tmp_path / "data.csv", 1)
    with progress.listening(heard.append):
        first = validated_run(tmp_path)
    says = "drift: there is no earlier stored run to compare the data with"
    assert says in [event.get("message") for event in heard]
    heard.clear()
    found = first.read(Validation)
    assert found.drift is not None
    assert found.drift.reference is None
    assert found.profile is not None
    assert set(found.profile.columns) == {"a", "b", "colour", "label"}
    succeeded(first)

    write_csv(tmp_path / "data.csv", 2)
    drift = validated_run(tmp_path).read(Validation).drift
    assert drift is not None
    assert (drift.reference, drift.drifted) == (first.uri, [])

    write_csv(tmp_path / "data.csv", 3, shift=0.4)
    with progress.listening(heard.append):
        warned = validated_run(tmp_path)
    validation = warned.read(Validation)
    assert validation.success
    assert validation.drift is not None
    assert [column.column for column in validation.drift.drifted] == ["a"]
    notices = [event for event in heard if event["event"] == "notice"]
    assert [event["column"] for event in notices] == ["a"]
    assert set(notices[0]) >= {"statistic", "value", "threshold", "message"}
    summary = next(e["summary"] for e in heard if e["event"] == "step" and "summary" in e)
    assert summary["drift"] == {
        "reference": first.uri,
        "drifted": ["a"],
        "columns_drifted": 1,
    }

    with pytest.raises(DataRejected, match=r"1 column drifted from .*: column 'a'") as caught:
        validated_run(tmp_path, drift="fail")
    assert not doors.ledger().held()
    page = Path(str(caught.value.document()["page"]).removeprefix("file://"))
    shown = page.read_text()
    assert "column &#x27;a&#x27;: mean shift in standard deviations" in shown
    assert "<svg" in shown
    saved = tmp_path / "saved.html"
    done = CliRunner().invoke(app, ["show", page.parent.as_uri(), "--report", str(saved)])
    assert (done.exit_code, saved.read_text()) == (0, shown)

    assert validated_run(tmp_path, drift="off").read(Validation).drift is None

    name = f"x/{warned.id}"
    drift = validated_run(tmp_path, reference=name).read(Validation).drift
    assert drift is not None
    assert (drift.reference, drift.drifted) == (warned.uri, [])

    version = f"x/{found.suite_version}"
    uri = f"{store}/suites/{version}.json"
    for name in (version, uri):  # the profile of the first run's data
        drift = validated_run(tmp_path, reference=name).read(Validation).drift
        assert drift is not None
        assert drift.reference == uri
        assert [column.column for column in drift.drifted] == ["a"]
    with pytest.raises(BadInput, match="there is no such suite; allowed: a suite that a run"):
        validated_run(tmp_path, reference=f"x/{'0' * 64}")

    job = tmp_path / "job.json"
    job.write_text(json.dumps({"name": "x", "data": {"uri": "data.csv"}}))
    shown = run("validate", str(job))
    assert shown.returncode == 0
    assert f"driftfrom{first.uri}" in "".join(shown.stdout.split())
    assert "drift: column 'a': mean shift in standard deviations 0.4" in shown.stderr
    rejected = run("validate", str(job), "--set", "data.drift=fail", "--json")
    error = json.loads(rejected.stdout)["error"]
    assert (rejected.returncode, error["kind"]) == (1, "data_rejected")
    assert error["validation"]["drift"]["columns"][0]["column"] == "a"
    assert error["validation"]["profile"] is None


@pytest.mark.parametrize("given", ["x", "x/20260101T000000Z-abcdef", "file:///nowhere"])
def test_a_reference_that_is_no_run_is_refused_at_once(
    store: str, tmp_path: Path, given: str
) -> None:
    write_csv(tmp_path / "data.csv", 1)
    data = {"uri": str(tmp_path / "data.csv"), "reference": given}
    with pytest.raises(BadInput, match=rf"data\.reference: got '?{given}'?; allowed: "):
        validate_data(data, doors.settings())


def test_arrays_are_compared_by_the_mean_of_each_row_and_the_target(
    store: str, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    for number, name in enumerate(("dark", "bright")):
        images = random.integers(0, 200, (600, 4, 4), dtype=np.uint8) + np.uint8(50 * number)
        np.savez(tmp_path / f"{name}.npz", images=images, label=random.integers(0, 2, 600))
    reference = doors.open_for(
        load_job({"name": "x", "data": {"uri": str(tmp_path / "dark.npz")}}), Holder("me")
    )
    doors.do(reference, "validate")
    profile = reference.read(Validation).profile
    assert profile is not None
    assert set(profile.columns) == {"pixel_mean", "label"}
    uri = str(tmp_path / "bright.npz")
    with pytest.raises(DataRejected, match=r"1 column drifted .*'pixel_mean'"):
        validate_data({"uri": uri, "reference": reference.uri, "drift": "fail"}, doors.settings())
