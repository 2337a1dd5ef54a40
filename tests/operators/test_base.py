"""Operators and their runs outside a DAG: a run folder, a ledger, Airflow's context."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import doors
import pytest
import structlog
from airflow.sdk.exceptions import AirflowFailException
from finished_run import finished_training, sealed_run

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import Structure
from trainwright.operators import (
    AnalyzeOperator,
    ExportOperator,
    ExtractOperator,
    TrainOperator,
)
from trainwright.operators.base import StepOperator
from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.run_status import Status
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.run import list_runs


def _job(folder: Path) -> dict[str, Any]:
    (folder / "m.py").write_text("def build_model():\n    return None\n")
    return {
        "name": "small",
        "data": {"uri": "builtin:digits"},
        "model": {"source": str(folder / "m.py")},
    }


def context(run_id: str) -> Any:
    return {"dag_run": SimpleNamespace(dag_id="foreign", run_id=run_id)}


def test_a_dag_that_trains_twice_does_not_reuse_the_first_model(home: Path, tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    job = _job(tmp_path)
    first = TrainOperator(task_id="train", job=job, store=store).open(context("first day")).run
    first.write(finished_training((tmp_path / "other").as_uri()).read(Result))
    Ledger(doors.settings().ledger_url).release(first.uri)
    opened = TrainOperator(task_id="train", job=job, store=store).open(context("second day")).run
    assert opened.uri != first.uri
    assert [lease.run for lease in Ledger(doors.settings().ledger_url).held()] == [opened.uri]


def test_the_steps_of_one_dag_run_share_a_run(home: Path, tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    job = _job(tmp_path)
    first = ExtractOperator(task_id="extract", job=job, store=store).open(context("day")).run
    Ledger(doors.settings().ledger_url).release(first.uri)
    assert (
        TrainOperator(task_id="train", job=job, store=store).open(context("day")).run.uri
        == first.uri
    )
    assert len(list(list_runs(store, doors.settings(), "small"))) == 1


def test_an_operator_without_run_and_job_is_refused(home: Path) -> None:
    with pytest.raises(BadInput, match="pass either `run` or `job`"):
        TrainOperator(task_id="train").open(context("day"))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_successful_run_can_be_analysed_again_while_its_job_trains(
    home: Path, tmp_path: Path, damaged: bool
) -> None:
    run = sealed_run((tmp_path / "store").as_uri(), 1, 0.9)
    run.write(
        Structure(
            batch_size=1,
            optimizer="sgd",
            precision="fp32",
            method="fake tensors",
            parameters=1,
            parameter_bytes=4,
            forward_flops_per_sample=1.0,
            activation_bytes_per_sample=1.0,
            layers=[],
            features={},
            operations={},
            trace=[],
            peak_memory_bytes=Affine(fixed=0, per_sample=1.0),
        )
    )
    run.note(state="success", step=None)
    before = run.objects.get(Status.FILE)
    ledger = Ledger(doors.settings().ledger_url)
    ledger.take([run.hold], Holder("who trains now"), "another run")
    if damaged:
        run.objects.put(Result.FILE, b"{")
        with pytest.raises(AirflowFailException, match=r"result\.json"):
            AnalyzeOperator(task_id="analyze", run=run.uri).execute(context("r1"))
    else:
        assert (
            AnalyzeOperator(task_id="analyze", run=run.uri).execute(context("r1"))["artefact"]
            == "report/report.json"
        )
    assert run.objects.get(Status.FILE) == before
    assert [(one.resource, one.holder) for one in ledger.held()] == [(run.hold, "who trains now")]


def _logged(operator: StepOperator) -> dict[str, Any]:
    """The record of a task's failure, as Airflow writes it."""
    with structlog.testing.capture_logs() as records:
        try:
            operator.execute(context("day"))
        except Exception:  # noqa: BLE001 - as Airflow does
            structlog.get_logger("task").exception("Task failed with exception")
    *_, record = records  # before it, Airflow may say how it was called
    return dict(record)


def test_an_expected_failure_is_one_line_of_the_tasks_log_without_a_traceback(
    home: Path, tmp_path: Path
) -> None:
    job = {**_job(tmp_path), "train": {"epochs": "many"}}
    record = _logged(ExtractOperator(task_id="extract", job=job))
    line = "bad_input: job: train.epochs: got 'many'; allowed: a whole number"
    assert record.pop("event")[: len(line)] == line
    assert record == {"log_level": "error"}


def test_a_failure_that_airflow_retries_is_one_line_too(home: Path) -> None:
    class Away(ExtractOperator):
        def work(self, context: Any) -> dict[str, Any]:
            raise ServiceUnreachable("the store does not answer; start it with `trainwright up`")

    record = _logged(Away(task_id="away", job={}))
    line = "service_unreachable: the store does not answer; start it with `trainwright up`"
    assert record == {"log_level": "error", "event": line}


def test_an_unexpected_error_keeps_its_traceback(home: Path) -> None:
    class Broken(ExtractOperator):
        def work(self, context: Any) -> dict[str, Any]:
            raise ZeroDivisionError

    record = _logged(Broken(task_id="broken", job={}))
    assert record["exc_info"] is True
    assert record["event"] == "Task failed with exception"


def test_an_export_without_its_packages_fails_without_a_retry(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sealed_run((tmp_path / "store").as_uri(), 1, 0.9)
    job = run.job().model_dump(mode="json", exclude={"schema_version"})
    run.write(RunJob.model_validate({**job, "export": ["onnx"]}))
    run.note(state="success", step=None)
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else there(name)
    )
    with pytest.raises(
        AirflowFailException, match=r"^not_installed: .*packages onnxruntime; install"
    ):
        ExportOperator(task_id="export", run=run.uri).execute(context("r1"))
