"""The run folder: one live run per job, continued if it is unfinished and unchanged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import doors
import pytest

from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, CorruptArtefact, RunHeld
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.run_status import Status
from trainwright.tasks.runs.run import Run, list_runs, open_run, resolve
from trainwright.tasks.spec.job import Job, load_job
from trainwright.tasks.store import seal

ME, OTHER = Holder("me"), Holder("other")


@pytest.fixture
def job(tmp_path: Path, home: Path) -> Job:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.py").write_text("def build_model():\n    return None\n")
    return load_job(
        {
            "name": "small",
            "data": {"uri": "builtin:digits"},
            "model": {"source": str(tmp_path / "model" / "m.py")},
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


def freed() -> None:
    ledger = Ledger(doors.settings().ledger_url)
    for lease in ledger.held():
        ledger.release(lease.run)


def finish(run: Run) -> None:
    seal(run)
    run.note(state="success")


def test_a_second_run_of_a_live_job_is_refused_with_the_holders_name(job: Job, store: str) -> None:
    first = open_run(job, doors.settings(), ME, store)
    for new in (False, True):
        with pytest.raises(RunHeld, match="held by me"):
            open_run(job, doors.settings(), OTHER, store, new=new)
    assert [run.uri for run in list_runs(store, doors.settings())] == [first.uri]


def test_a_run_that_a_process_of_this_machine_holds_is_refused_with_its_pid(
    job: Job, store: str
) -> None:
    open_run(job, doors.settings(), Holder("me", os.getpid()), store)
    with pytest.raises(RunHeld, match=rf"held by me \(pid {os.getpid()}\) for"):
        open_run(job, doors.settings(), OTHER, store)


def test_an_unfinished_run_that_nobody_holds_is_continued_and_a_finished_one_is_not(
    job: Job, store: str
) -> None:
    first = open_run(job, doors.settings(), ME, store)
    freed()
    again = open_run(job, doors.settings(), OTHER, store)
    assert again.uri == first.uri
    assert again.status().holder == "other"
    finish(again)
    freed()
    assert open_run(job, doors.settings(), ME, store).uri != first.uri


def test_a_changed_job_or_source_or_new_starts_a_new_run(
    job: Job, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[dict[str, Any]] = []
    progress.listen(heard.append)
    first = open_run(job, doors.settings(), ME, store)
    freed()
    changed = job.model_copy(update={"train": job.train.model_copy(update={"epochs": 99})})
    second = open_run(changed, doors.settings(), ME, store)
    freed()
    assert job.model is not None
    Path(job.model.source).write_text("def build_model():\n    return 1\n")
    third = open_run(changed, doors.settings(), ME, store)
    freed()
    fourth = open_run(changed, doors.settings(), ME, store, new=True)
    assert len({first.uri, second.uri, third.uri, fourth.uri}) == 4
    assert len(heard) == 2
    assert (
        heard[0]["message"]
        == f"starting a new run: the unfinished run {first.uri} has a different train.epochs"
    )


def test_a_missing_field_differs_from_a_null_one(job: Job, store: str) -> None:
    assert job.model is not None
    null = job.model_copy(
        update={"model": job.model.model_copy(update={"config": {"dropout": None}})}
    )
    first = open_run(job, doors.settings(), ME, store)
    freed()
    assert open_run(null, doors.settings(), ME, store).uri != first.uri


def test_a_new_run_reports_which_module_has_changed(
    job: Job, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[dict[str, Any]] = []
    progress.listen(heard.append)
    first = open_run(job, doors.settings(), ME, store)
    freed()
    assert job.model is not None
    source = Path(job.model.source)
    whole = source.read_text()
    source.write_text("def build_model():\n    return 1\n")
    (source.parent / "added.py").touch()
    assert open_run(job, doors.settings(), ME, store).uri != first.uri
    assert [event["message"] for event in heard] == [
        f"starting a new run: the unfinished run {first.uri} has a different source/added.py, "
        f"source/{source.name}"
    ]
    freed()
    source.write_text(whole)
    (source.parent / "added.py").unlink()
    assert open_run(job, doors.settings(), ME, store).uri == first.uri


def test_a_damaged_unfinished_run_is_reported_with_the_advice_to_use_new(
    job: Job, store: str
) -> None:
    first = open_run(job, doors.settings(), ME, store)
    freed()
    for file, whole in ((f, first.objects.get(f)) for f in ("source/source.json", "job.json")):
        for damaged in (b"{", b"{}", b""):
            first.objects.put(file, damaged)
            with pytest.raises(CorruptArtefact, match="--new starts a new run"):
                open_run(job, doors.settings(), ME, store)
        first.objects.put(file, whole)
    assert open_run(job, doors.settings(), ME, store).uri == first.uri


def test_a_worker_continues_only_its_own_run_and_only_if_the_artefact_is_missing(
    job: Job, store: str
) -> None:
    first = open_run(job, doors.settings(), ME, store)
    freed()
    others = open_run(job, doors.settings(), OTHER, store, worker=OTHER.name)
    freed()
    assert others.uri != first.uri
    assert open_run(job, doors.settings(), ME, store, worker=ME.name).uri == first.uri
    freed()
    newest = open_run(job, doors.settings(), ME, store, lacking=Plan)
    assert newest.uri in (first.uri, others.uri)
    freed()
    newest.objects.put(Plan.FILE, b"{}")
    assert open_run(job, doors.settings(), ME, store, lacking=Plan).uri not in (
        first.uri,
        others.uri,
    )


def test_the_source_is_stored_and_verified(job: Job, store: str) -> None:
    run = open_run(job, doors.settings(), ME, store)
    folder = run.source_folder()
    assert (folder / run.model().entry).read_text().startswith("def build_model")
    run.objects.put("source/m.py", b"evil = True\n")
    with pytest.raises(CorruptArtefact, match="sha256 differs"):
        run.model()


def test_a_damaged_artefact_is_named(job: Job, store: str) -> None:
    run = open_run(job, doors.settings(), ME, store)
    assert run.find(Plan) is None
    run.objects.put("plan.json", b'{"feasible": ')
    with pytest.raises(CorruptArtefact, match=r"plan\.json"):
        run.read(Plan)


def test_artefacts_of_a_later_version_are_readable(job: Job, store: str) -> None:
    run = open_run(job, doors.settings(), ME, store)
    later = (
        run.status()
        .model_dump_json()
        .replace('"schema_version":1', '"schema_version":2,"colour":"blue"')
    )
    run.objects.put("status.json", later.encode())
    assert run.read(Status).state == "running"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "runs/x",
        "s3://b/runs/../x",
        "s3://b/runs/<script>/20260101T000000Z-abcdef",
        "http://h/runs/a/b",
    ],
)
def test_an_invalid_run_uri_is_refused(uri: str) -> None:
    with pytest.raises(BadInput, match="run: got"):
        doors.run_at(uri)


def test_an_unknown_id_is_refused_and_cut(store: str) -> None:
    with pytest.raises(BadInput, match=r"^run: got 'a{80}'; allowed: a run's URI, or an id"):
        resolve("a" * 5000, doors.settings(), store)


def test_a_run_that_is_trained_and_not_stored_is_continued(job: Job, store: str) -> None:
    first = open_run(job, doors.settings(), ME, store)
    first.note(state="success", step=None)
    freed()
    assert open_run(job, doors.settings(), OTHER, store).uri == first.uri


def test_a_sealed_run_without_a_report_is_continued(job: Job, store: str) -> None:
    first = open_run(job, doors.settings(), ME, store)
    seal(first)
    freed()
    assert open_run(job, doors.settings(), OTHER, store).uri == first.uri


def test_a_job_of_a_later_version_is_readable(job: Job, store: str) -> None:
    run = open_run(job, doors.settings(), ME, store)
    document = json.loads(run.objects.get("job.json"))
    document["train"]["of_a_later_version"] = 1
    run.objects.put("job.json", json.dumps(document).encode())
    assert run.job().model_dump(exclude={"schema_version", "given"}) == job.model_dump()
