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
    CalibrateOperator,
    EstimateOperator,
    ExportOperator,
    ExtractOperator,
    TrainOperator,
)
from trainwright.operators.base import StepOperator
from trainwright.operators.failures import airflows_words
from trainwright.tasks.errors import BadInput, Interrupted, ServiceUnreachable
from trainwright.tasks.leases.ledger import Holder, Ledger
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


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "it has changed; --new starts a new run with it",
            "a trigger with `new` (Start afresh) st",
        ),
        ("train again with `trainwright run JOB --new`", "again with a trigger with `new` (Start"),
        ("calibrate: interrupted; the same command continues", "clearing this task, or a new trig"),
        ("it is kept in /x: start again on this machine", "clear this task on this machine"),
        ("--budget: got -1; allowed: 1 or more", "budget_s: got -1; allowed: 1 or more"),
        ("it needs 3 GiB; use --set train.global_batch_size=8", "use train.global_batch_size in"),
        ("--out: x exists and holds no predictions", "out: x exists and holds no predictions"),
    ],
)
def test_a_failure_says_what_to_do_in_airflow(said: str, shown: str) -> None:
    assert shown in airflows_words(said)


def test_a_stopped_step_says_how_it_continues(home: Path) -> None:
    class Stopped(ExtractOperator):
        def work(self, context: Any) -> dict[str, Any]:
            raise Interrupted("stopped after step 5; its checkpoint is kept")

    line = "interrupted: stopped after step 5; its checkpoint is kept; it continues when Airflow"
    assert _logged(Stopped(task_id="stopped", job={}))["event"].startswith(line)


@pytest.mark.parametrize(
    ("operator", "inputs", "says"),
    [
        (ExtractOperator, {"model": "m.py", "batch_size": "many"}, "batch_size: got 'many'; allow"),
        (ExtractOperator, {"model": "m.py", "batch_size": "1.5"}, "batch_size: got '1.5'; allowed"),
        (EstimateOperator, {"model": "m.py", "device_types": 5}, "model.source: got m.py; there"),
        (CalibrateOperator, {"device_type": 5}, "device type: got '5'"),
        (CalibrateOperator, {"threads": "inf"}, "threads: got 'inf'; allowed: a whole number"),
        (CalibrateOperator, {"addresses": 5}, "addresses: got 5; allowed: a list of texts"),
        (AnalyzeOperator, {"run": "nonsense"}, "run: got 'nonsense'; allowed"),
        (
            TrainOperator,
            {"job": '{"refused": "job: what the form says"}'},
            "job: what the form says",
        ),
        (TrainOperator, {"job": {}, "store_conn_id": "no"}, "store_conn_id: got 'no'; Airflow has"),
    ],
)
def test_a_wrong_input_of_an_operator_is_one_line(
    home: Path, operator: type[Any], inputs: dict[str, Any], says: str
) -> None:
    record = _logged(operator(task_id="x", **inputs))
    assert record.pop("event").startswith(f"bad_input: {says}")
    assert record == {"log_level": "error"}


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
    run = sealed_run((tmp_path / "store").as_uri(), 1, 0.9, export=["onnx"])
    run.note(state="success", step=None)
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else there(name)
    )
    with pytest.raises(
        AirflowFailException, match=r"^not_installed: .*packages onnxruntime; install"
    ):
        ExportOperator(task_id="export", run=run.uri).execute(context("r1"))
