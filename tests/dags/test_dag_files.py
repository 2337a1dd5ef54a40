"""The DAG files: their imports, their DAGs, their wiring. No test here runs a DAG."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainwright.dags
from trainwright.estimator.machine import MOST_DRIFT

SERVE = """
import json, os, sys, traceback
for line in sys.stdin:
    asked = json.loads(line)
    os.environ.update(asked["environment"])
    sys.modules.pop("trainwright.dags.retrain", None)  # it reads the job files when it is imported
    known = {}
    try:
        exec(asked["code"], known)
        loaded = [name for name in asked["heavy"] if name in sys.modules]
        result = {"answer": known["answer"], "heavy": loaded}
    except BaseException:
        result = {"error": traceback.format_exc()}
    print("RESULT", json.dumps(result), flush=True)
"""
HEAVY = ["torch", "numpy", "pandas", "scipy", "great_expectations", "dask", "horovod"]
LOOK = """
import trainwright.dags.retrain as module
from airflow.sdk import DAG
dags = {dag.dag_id: dag for dag in vars(module).values() if isinstance(dag, DAG)}
answer = {
    name: {"tasks": {
               t.task_id: [type(t).__module__, sorted(t.downstream_task_ids)] for t in dag.tasks
           },
           "schedule": str(dag.schedule), "doc": dag.doc_md, "params": sorted(dag.params),
           "first": list(dag.params)[:3],
           "catchup": dag.catchup,
           "description": dag.description, "retries": [t.retries for t in dag.tasks],
           "assets": str(getattr(dag.timetable, "asset_condition", "")),
           "outlets": [
               getattr(o, "uri", getattr(o, "name", "")) for t in dag.tasks for o in t.outlets
           ],
           "deadlines": [one.interval.total_seconds() for one in dag.deadline or []],
           "teardown": [t.task_id for t in dag.tasks if t.is_teardown]}
    for name, dag in dags.items()}
"""
SHIPPED = Path(trainwright.dags.__path__[0]) / "jobs"


Look = Callable[..., dict[str, Any]]


class DagProcess:
    """A process that imports DAG files, as a DAG processor does. Tests share it."""

    def __init__(self, airflow_home: Path) -> None:
        environment = os.environ | {
            "AIRFLOW_HOME": str(airflow_home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error::DeprecationWarning:trainwright", "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(self, code: str, jobs: Path = SHIPPED) -> Any:
        """Run code with these job files; its `answer`. The code must load no heavy package."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        environment = {
            "TRAINWRIGHT_JOBS": str(jobs),
            "TRAINWRIGHT_HOME": os.environ["TRAINWRIGHT_HOME"],
        }
        print(
            json.dumps({"code": code, "environment": environment, "heavy": HEAVY}),
            file=self.process.stdin,
            flush=True,
        )
        result = next(
            json.loads(line.removeprefix("RESULT "))
            for line in self.process.stdout
            if line.startswith("RESULT ")
        )
        assert "error" not in result, result["error"]
        assert result["heavy"] == []
        return result["answer"]


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagProcess]:
    """Airflow, with DAG files to import."""
    started = DagProcess(tmp_path_factory.mktemp("airflow"))
    with started.process as process:
        yield started
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def look(airflow: DagProcess, home: Path) -> Look:
    """The DAGs that `retrain` makes from a folder of job files."""
    return lambda jobs=SHIPPED: airflow(LOOK, jobs)


def test_the_shipped_dags_load_nothing_heavy_and_use_only_our_operators(look: Look) -> None:
    dags = look()
    examples = {file.stem for file in Path(SHIPPED).glob("*.yaml")}
    assert len(examples) == 6
    assert set(dags) == {"retrain", *(f"retrain_{name}" for name in examples)}
    for dag in dags.values():
        assert all(
            module.startswith("trainwright.operators") for module, _ in dag["tasks"].values()
        )
        assert dag["teardown"] == ["release"]
        assert set(dag["retries"]) == {3}
        assert dag["catchup"] is False
    assert {"job", "new", "pool", "replay", "run", "name", "train.epochs"} <= set(
        dags["retrain"]["params"]
    )
    assert dags["retrain"]["first"] == ["name", "data.uri", "data.target"]
    assert dags["retrain_digits"]["outlets"] == [
        "x-trainwright://models/digits",
        "trainwright-promoted-models",
    ]


def test_the_steps_are_chained_in_order_and_release_follows_train(look: Look) -> None:
    tasks = look()["retrain"]["tasks"]
    order = [
        "validate",
        "recommend",
        "extract",
        "estimate",
        "allocate",
        "search_lr",
        "train",
        "store",
        "analyze",
        "export",
    ]
    for before, after in [*itertools.pairwise(order), ("store", "approve"), ("approve", "promote")]:
        assert after in tasks[before][1]
    assert "release" in tasks["train"][1]


def test_a_job_file_with_a_schedule_makes_a_dag_and_a_wrong_one_does_not_affect_others(
    look: Look, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "nightly.yaml").write_text(
        "name: nightly\ndata: {uri: 'builtin:digits'}\nschedule: {cron: '0 3 * * *'}\n"
    )
    (jobs / "wrong.yaml").write_text("name: wrong\nwat: 1\n")
    dags = look(jobs)
    assert set(dags) == {"retrain", "retrain_nightly", "retrain_wrong"}
    assert "0 3 * * *" in dags["retrain_nightly"]["schedule"]
    assert "data: required field is missing" in dags["retrain_wrong"]["doc"]


def test_operators_are_exported_lazily() -> None:
    code = (
        "import sys; from trainwright import operators; assert 'airflow' not in sys.modules; "
        "print(*[getattr(operators, name).__name__ for name in operators.__all__])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert {"AllocateOperator", "CalibrateOperator", "TrainOperator", "ValidateOperator"} <= set(
        done.stdout.split()
    )


def test_a_job_file_with_an_unusual_name_or_schedule_does_not_hide_other_dags(
    look: Look, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "My Job!.yaml").write_text("- a list\n")
    (jobs / "late.yaml").write_text(
        "name: late\ndata: {uri: 'builtin:digits'}\nschedule: {cron: '61 3 * * *'}\n"
    )
    (jobs / "good.yaml").write_text("name: good\ndata: {uri: 'builtin:digits'}\n")
    dags = look(jobs)
    assert set(dags) == {"retrain", "retrain_my-job-", "retrain_late", "retrain_good"}
    assert "schedule.cron: got '61 3 * * *'" in dags["retrain_late"]["doc"]


def test_scheduled_dag_runs_start_new_runs_and_manual_ones_continue(
    airflow: DagProcess, home: Path
) -> None:
    code = """
from types import SimpleNamespace
from airflow.sdk.api.datamodels._generated import DagRunType
import trainwright.dags.retrain as module
task = vars(module)["retrain_digits"].get_task("validate")
kinds = ("scheduled", "asset_triggered", "manual")
runs = [SimpleNamespace(run_type=DagRunType(kind)) for kind in kinds]
answer = [task.render_template(task.new, {"dag_run": run}) for run in runs]
"""
    assert [str(one) for one in airflow(code)] == ["True", "True", "False"]


def test_two_job_files_with_one_name_make_one_dag_and_an_error(look: Look, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for file in ("a.json", "a.yaml", "b.yaml"):
        (jobs / file).write_text(json.dumps({"name": "same", "data": {"uri": "builtin:digits"}}))
    (jobs / "same.yaml").write_text("- a list\n")
    dags = look(jobs)
    assert set(dags) == {"retrain", "retrain_same", "retrain_a", "retrain_b", "retrain_same-yaml"}
    assert "a.json" in dags["retrain_same"]["doc"]
    for name in "ab":
        assert (
            f"name: got 'same'; {jobs / 'a.json'} already has this name"
            in dags[f"retrain_{name}"]["doc"]
        )


def test_a_job_runs_on_new_data_and_on_schedule_and_its_deadline_is_an_alert(
    look: Look, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    data = (
        "name: {0}\ndata: {{uri: 's3://bucket/{0}.parquet'}}\nobjective: {{deadline: 30m}}\n"
        "queue_timeout: 10m\n"
    )
    (jobs / "a.yaml").write_text(data.format("a") + "schedule: {on_new_data: true}\n")
    (jobs / "b.yaml").write_text(
        data.format("b")
        + "schedule: {on_new_data: true, cron: '0 3 * * *'}\npromotion: {require_approval: true}\n"
    )
    dags = look(jobs)
    for name in "ab":
        assert f"uri='s3://bucket/{name}.parquet'" in dags[f"retrain_{name}"]["assets"]
    assert dags["retrain_a"]["deadlines"] == [1800.0 + 600.0]
    assert dags["retrain_b"]["deadlines"] == [1800.0 + 600.0 + 86400.0]
    assert dags["retrain"]["deadlines"] == []


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "../../x"])
def test_a_job_with_a_harmful_name_makes_a_harmless_dag(
    look: Look, tmp_path: Path, name: str
) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "<b>.json").write_text(json.dumps({"name": name, "data": {"uri": "builtin:digits"}}))
    dags = look(jobs)
    assert set(dags) == {"retrain", "retrain_-b-"}
    assert not [
        word
        for dag in dags.values()
        for word in (dag["doc"], dag["description"])
        if "<script" in word or "<b>" in word
    ]
    assert "job file is wrong" not in dags["retrain"]["doc"]


def test_candidates_are_mapped_and_history_is_analysed_for_every_job(
    airflow: DagProcess, home: Path
) -> None:
    code = """
from trainwright.dags.candidates import candidates
from trainwright.dags.analyze_history import analyze_history
answer = [
    sorted(candidates.task_dict),
    [g.group_id for g in candidates.task_dict["candidate.validate"].iter_mapped_task_groups()],
    sorted(candidates.task_dict["best"].upstream_task_ids),
    sorted(analyze_history.task_dict["analyze"].upstream_task_ids),
    sorted(candidates.task_dict["promote"].upstream_task_ids)]
"""
    tasks, mapped, before_best, before_analyze, before_promote = airflow(code)
    assert {
        "candidate_jobs",
        "candidate.train",
        "candidate.release",
        "candidate.store",
        "best",
        "promote",
    } <= set(tasks)
    assert (mapped, before_best, before_analyze) == (
        ["candidate"],
        ["candidate.store"],
        ["newest_runs"],
    )
    assert before_promote == ["approve", "best"]


def test_the_weekly_calibration_is_mapped_over_device_types_and_loads_nothing_heavy(
    airflow: DagProcess, home: Path
) -> None:
    code = """
from airflow.sdk.definitions.mappedoperator import MappedOperator
from trainwright.dags.calibrate_pool import calibrate_pool as dag
from trainwright.operators import CalibrateOperator
task = dag.task_dict["calibrate"]
answer = {
    "mapped": isinstance(task, MappedOperator) and task.operator_class is CalibrateOperator,
    "upstream": sorted(task.upstream_task_ids), "schedule": str(dag.schedule),
    "params": sorted(dag.params),
    "drift": [dag.params["most_drift"], CalibrateOperator(task_id="x").most_drift]}
"""
    assert airflow(code) == {
        "mapped": True,
        "upstream": ["device_types"],
        "schedule": "0 4 * * 0",
        "params": ["budget_s", "most_drift", "pool", "store"],
        "drift": [MOST_DRIFT, MOST_DRIFT],
    }


FIRST = """
from datetime import timedelta
from airflow.sdk import DAG
from airflow.sdk.timezone import utcnow
from airflow.serialization.serialized_objects import DagSerialization
import trainwright.dags.analyze_history, trainwright.dags.calibrate_pool, trainwright.dags.retrain
answer = {}
dags = trainwright.dags
for module in (dags.analyze_history, dags.calibrate_pool, dags.retrain):
    for dag in [one for one in vars(module).values() if isinstance(one, DAG) and one.schedule]:
        read = DagSerialization.from_dict(DagSerialization.to_dict(dag))
        first = read.next_dagrun_info(last_automated_run_info=None)
        late = utcnow() - first.run_after
        # A tenth of a week: a run that was just missed is caught up.
        answer[dag.dag_id] = late < timedelta(days=0.7)
"""


def test_scheduled_dags_do_not_catch_up_on_missed_runs(
    airflow: DagProcess, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "nightly.yaml").write_text(
        "name: nightly\ndata: {uri: 'builtin:digits'}\nmodel: {source: m.py}\n"
        "schedule: {cron: '0 3 * * 3'}"
    )
    assert airflow(FIRST, tmp_path) == {
        "analyze_history": True,
        "calibrate_pool": True,
        "retrain_nightly": True,
    }
