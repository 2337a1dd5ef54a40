"""Inferred suites are kept by version, with their profile; an edited one is left as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import doors
import pytest
from typer.testing import CliRunner

from trainwright.tasks.cli.main import app
from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.runs.artefacts.data_profile import DataProfile
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.job import Job, load_job
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.validate.check import failure_line
from trainwright.tasks.validate.kept_suite import (
    KeptSuite,
    keep_suite,
    kept_suite,
    suite_version,
    with_version,
)
from trainwright.tasks.validate.step import validate_job

JOB = Job(name="x", data=DataSpec(uri="data.csv"))
FEW = [{"type": "expect_column_to_exist", "kwargs": {"column": "a"}}]
MORE = [*FEW, {"type": "expect_column_to_exist", "kwargs": {"column": "b"}}]


def validation(suite: list[dict[str, Any]], rows: int = 12) -> Validation:
    """The validation of data by a suite that was inferred from it."""
    return Validation(
        success=True,
        suite_source="inferred",
        suite=suite,
        expectations=[],
        checked_rows=rows,
        great_expectations={},
        profile=DataProfile(rows=rows, target="label", columns={}),
    )


def versions(store: FolderStore) -> list[str]:
    return [one.key for one in store.list("suites/x/")]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def test_only_another_content_is_another_version(store: FolderStore) -> None:
    keep_suite(store, JOB, "file:///runs/x/1", validation(FEW))
    first = versions(store)
    same = [{"kwargs": {"column": "a"}, "type": "expect_column_to_exist"}]
    store.delete("suites/x.json")
    keep_suite(store, JOB, "file:///runs/x/2", validation(same, rows=13))
    assert versions(store) == first == [f"suites/x/{suite_version(FEW)}.json"]
    kept = KeptSuite.model_validate_json(store.get(first[0]))
    assert (kept.run, kept.profile) == ("file:///runs/x/1", validation(FEW).profile)

    store.delete("suites/x.json")
    keep_suite(store, JOB, "file:///runs/x/3", validation(MORE))
    assert set(versions(store)) == {*first, f"suites/x/{suite_version(MORE)}.json"}
    in_force = kept_suite(store, JOB)
    assert in_force is not None
    assert (in_force.run, in_force.expectations) == ("file:///runs/x/3", MORE)
    store.put("suites/x.json", store.get(first[0]))
    assert kept_suite(store, JOB) == kept


def test_an_edited_suite_stays_in_force_and_names_no_profile(store: FolderStore) -> None:
    keep_suite(store, JOB, "file:///runs/x/1", validation(FEW))
    edited = json.dumps({"name": "mine", "expectations": MORE}).encode()
    store.put("suites/x.json", edited)
    keep_suite(store, JOB, "file:///runs/x/2", validation(FEW))
    assert store.get("suites/x.json") == edited
    kept = kept_suite(store, JOB)
    assert kept == KeptSuite(expectations=MORE)
    checked = with_version(validation(MORE).model_copy(update={"suite_source": "kept"}), kept)
    assert checked.suite_words == f"kept, version {suite_version(MORE)[:12]}"
    assert len(versions(store)) == 1


def test_a_job_with_a_suite_of_its_own_has_no_kept_one(store: FolderStore) -> None:
    keep_suite(store, JOB, "file:///runs/x/1", validation(FEW))
    own = JOB.data.model_copy(update={"expectations": "suite.json"})
    assert kept_suite(store, JOB.model_copy(update={"data": own})) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "holds no expectations"),
        (b'[{"kwargs": {}}]', "entry 0 is no expectation"),
    ],
)
def test_an_unusable_suite_in_force_is_named(store: FolderStore, content: bytes, says: str) -> None:
    store.put("suites/x.json", content)
    with pytest.raises(
        CorruptArtefact, match=rf"suites/x\.json.*{says}.*; delete it, and the next"
    ):
        kept_suite(store, JOB)


def test_an_unusable_version_is_named(store: FolderStore) -> None:
    keep_suite(store, JOB, "file:///runs/x/1", validation(FEW))
    (key,) = versions(store)
    store.put(key, b"{")
    with pytest.raises(CorruptArtefact, match=rf"{key}: .*; delete it"):
        kept_suite(store, JOB)


def validated_run(folder: Path) -> Run:
    return doors.validated(load_job({"name": "x", "data": {"uri": str(folder / "data.csv")}}))


def test_runs_name_the_version_that_checked_them_and_the_profile_that_it_was_inferred_from(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_STORE", (tmp_path / "store").as_uri())
    lines = "".join(f"{n},{n % 2}\n" for n in range(40))
    (tmp_path / "data.csv").write_text("a,label\n" + lines)
    run = validated_run(tmp_path)
    first = run.read(Validation)
    (key,) = versions(FolderStore(tmp_path / "store"))
    kept = KeptSuite.model_validate_json(run.root().get(key))
    assert key == f"suites/x/{first.suite_version}.json"
    assert (kept.run, kept.profile) == (run.uri, first.profile)
    assert first.suite_profile == kept.profile_sha256 is not None

    (tmp_path / "data.csv").write_text("a,label\n" + lines + "7,1\n")
    second = validated_run(tmp_path).read(Validation)
    assert second.suite_source == "kept"
    assert (second.suite_version, second.suite_profile) == (
        first.suite_version,
        first.suite_profile,
    )
    assert second.profile != first.profile


def test_other_columns_or_another_target_are_told_in_one_line_and_a_suite_can_be_forgotten(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_STORE", (tmp_path / "store").as_uri())
    rows = [f"{n},{n % 3},{n % 2}" for n in range(40)]
    (tmp_path / "data.csv").write_text("a,b,label\n" + "\n".join(rows) + "\n")
    validated_run(tmp_path)

    def line(**data: Any) -> str:
        uri = str(tmp_path / "data.csv")
        job = load_job({"name": "x", "data": {"uri": uri, **data}})
        found = validate_job(job, doors.settings())
        assert not found.success
        return failure_line(found)

    assert "the target was 'label' and is 'b'" in line(target="b")
    (tmp_path / "data.csv").write_text("a,c,label\n" + "\n".join(rows) + "\n")
    said = line()
    assert "expectations: no column 'b', unknown column 'c'; the suite is kept" in said
    assert "`trainwright validate JOB --forget-suite`" in said
    job = {"name": "x", "data": {"uri": str(tmp_path / "data.csv")}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = CliRunner().invoke(app, ["validate", str(tmp_path / "job.json"), "--forget-suite"])
    assert done.exit_code == 0, done.output
    assert validated_run(tmp_path).read(Validation).suite_source == "inferred"
