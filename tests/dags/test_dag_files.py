"""The DAG files: what they load, which DAGs they make, how they are wired. Airflow is real; nothing is run here."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainwright.estimator.machine import MOST_DRIFT

LOOK = """
import json, sys
import trainwright.dags.retrain as module
from airflow.sdk import DAG
heavy = [name for name in sys.argv[1].split() if name in sys.modules]
dags = {dag.dag_id: dag for dag in vars(module).values() if isinstance(dag, DAG)}
print(json.dumps({"heavy": heavy, "dags": {
    name: {"tasks": {t.task_id: [type(t).__module__, sorted(t.downstream_task_ids)] for t in dag.tasks},
           "schedule": str(dag.schedule), "doc": dag.doc_md, "params": sorted(dag.params), "catchup": dag.catchup,
           "description": dag.description, "retries": [t.retries for t in dag.tasks],
           "assets": str(getattr(dag.timetable, "asset_condition", "")),
           "outlets": [getattr(o, "uri", getattr(o, "name", "")) for t in dag.tasks for o in t.outlets],
           "deadlines": [one.interval.total_seconds() for one in dag.deadline or []],
           "teardown": [t.task_id for t in dag.tasks if t.is_teardown]}
    for name, dag in dags.items()}}))
"""


def look(jobs: Path | None, tmp_path: Path) -> dict[str, Any]:
    environment = os.environ | {"AIRFLOW_HOME": str(tmp_path / "airflow"), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    if jobs is not None:
        environment["TRAINWRIGHT_JOBS"] = str(jobs)
    heavy = "torch numpy pandas great_expectations dask horovod"
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:trainwright", "-c", LOOK, heavy],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    parsed = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(parsed, dict)
    return parsed


def test_the_shipped_dags_load_nothing_heavy_and_every_operator_is_ours(home: Path, tmp_path: Path) -> None:
    found = look(None, tmp_path)
    assert found["heavy"] == []
    assert set(found["dags"]) == {"retrain", "retrain_digits"}
    for dag in found["dags"].values():
        assert all(module.startswith("trainwright.operators") for module, _ in dag["tasks"].values())
        assert dag["teardown"] == ["release"]
        assert set(dag["retries"]) == {3}
        assert dag["catchup"] is False
    assert {"job", "new", "pool", "replay", "run", "name", "train.epochs"} <= set(found["dags"]["retrain"]["params"])
    assert found["dags"]["retrain_digits"]["outlets"] == [
        "x-trainwright://models/digits",
        "trainwright-promoted-models",
    ]


def test_the_steps_are_chained_in_order_and_release_follows_train(home: Path, tmp_path: Path) -> None:
    tasks = look(None, tmp_path)["dags"]["retrain"]["tasks"]
    order = ["validate", "extract", "estimate", "allocate", "search_lr", "train", "store", "analyze"]
    for before, after in [*itertools.pairwise(order), ("store", "approve"), ("approve", "promote")]:
        assert after in tasks[before][1]
    assert "release" in tasks["train"][1]


def test_a_job_file_with_a_schedule_makes_a_scheduled_dag_and_a_wrong_one_harms_nobody(
    home: Path, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "nightly.yaml").write_text("name: nightly\ndata: {uri: 'builtin:digits'}\nschedule: {cron: '0 3 * * *'}\n")
    (jobs / "wrong.yaml").write_text("name: wrong\nwat: 1\n")
    dags = look(jobs, tmp_path)["dags"]
    assert set(dags) == {"retrain", "retrain_nightly", "retrain_wrong"}
    assert "0 3 * * *" in dags["retrain_nightly"]["schedule"]
    assert "data: missing" in dags["retrain_wrong"]["doc"]


@pytest.mark.parametrize("name", ["AllocateOperator", "CalibrateOperator", "TrainOperator", "ValidateOperator"])
def test_operators_are_exported_lazily(name: str) -> None:
    code = f"import sys; from trainwright import operators; assert 'airflow' not in sys.modules; operators.{name}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_job_file_with_a_strange_name_or_schedule_takes_no_other_dag_away(home: Path, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "My Job!.yaml").write_text("- a list\n")
    (jobs / "late.yaml").write_text("name: late\ndata: {uri: 'builtin:digits'}\nschedule: {cron: '61 3 * * *'}\n")
    (jobs / "good.yaml").write_text("name: good\ndata: {uri: 'builtin:digits'}\n")
    dags = look(jobs, tmp_path)["dags"]
    assert set(dags) == {"retrain", "retrain_my-job-", "retrain_late", "retrain_good"}
    assert "schedule.cron: got '61 3 * * *'" in dags["retrain_late"]["doc"]


def test_what_is_due_trains_anew_and_what_a_person_triggers_goes_on(home: Path, tmp_path: Path) -> None:
    code = """
from types import SimpleNamespace
from airflow.sdk.api.datamodels._generated import DagRunType
import trainwright.dags.retrain as module
task = vars(module)["retrain_digits"].get_task("validate")
for kind in ("scheduled", "asset_triggered", "manual"):
    print(task.render_template(task.new, {"dag_run": SimpleNamespace(run_type=DagRunType(kind))}))
"""
    environment = os.environ | {"AIRFLOW_HOME": str(tmp_path / "airflow"), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split()[-3:] == ["True", "True", "False"]


def test_two_job_files_of_one_name_are_one_dag_and_a_word_about_the_other(home: Path, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for file in ("a.json", "a.yaml", "b.yaml"):
        (jobs / file).write_text(json.dumps({"name": "same", "data": {"uri": "builtin:digits"}}))
    (jobs / "same.yaml").write_text("- a list\n")
    dags = look(jobs, tmp_path)["dags"]
    assert set(dags) == {"retrain", "retrain_same", "retrain_a", "retrain_b", "retrain_same-yaml"}
    assert "a.json" in dags["retrain_same"]["doc"]
    for name in "ab":
        assert f"name: got 'same'; {jobs / 'a.json'} has that name already" in dags[f"retrain_{name}"]["doc"]


def test_new_data_and_the_clock_both_run_a_job_that_asks_for_it_and_its_deadline_is_an_alert(
    home: Path, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    data = "name: {0}\ndata: {{uri: 's3://bucket/{0}.parquet'}}\nobjective: {{deadline: 30m}}\nqueue_timeout: 10m\n"
    (jobs / "a.yaml").write_text(data.format("a") + "schedule: {on_new_data: true}\n")
    (jobs / "b.yaml").write_text(
        data.format("b") + "schedule: {on_new_data: true, cron: '0 3 * * *'}\npromotion: {require_approval: true}\n"
    )
    dags = look(jobs, tmp_path)["dags"]
    for name in "ab":
        assert f"uri='s3://bucket/{name}.parquet'" in dags[f"retrain_{name}"]["assets"]
    assert dags["retrain_a"]["deadlines"] == [1800.0 + 600.0]
    assert dags["retrain_b"]["deadlines"] == [1800.0 + 600.0 + 86400.0]
    assert dags["retrain"]["deadlines"] == []


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "../../x"])
def test_a_job_with_a_harmful_name_makes_a_harmless_dag(home: Path, tmp_path: Path, name: str) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "<b>.json").write_text(json.dumps({"name": name, "data": {"uri": "builtin:digits"}}))
    dags = look(jobs, tmp_path)["dags"]
    assert set(dags) == {"retrain", "retrain_-b-"}
    assert not [
        word for dag in dags.values() for word in (dag["doc"], dag["description"]) if "<script" in word or "<b>" in word
    ]
    assert "job file is wrong" not in dags["retrain"]["doc"]


def test_candidates_are_mapped_and_history_is_analysed_for_every_job(home: Path, tmp_path: Path) -> None:
    code = """
import json
from airflow.sdk import DAG
from trainwright.dags.candidates import candidates
from trainwright.dags.analyze_history import analyze_history
print(json.dumps([
    sorted(candidates.task_dict), [g.group_id for g in candidates.task_dict["candidate.validate"].iter_mapped_task_groups()],
    sorted(candidates.task_dict["best"].upstream_task_ids), sorted(analyze_history.task_dict["analyze"].upstream_task_ids),
    sorted(candidates.task_dict["promote"].upstream_task_ids)]))
"""
    environment = os.environ | {"AIRFLOW_HOME": str(tmp_path / "airflow"), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    tasks, mapped, before_best, before_analyze, before_promote = json.loads(done.stdout.splitlines()[-1])
    assert {"candidate_jobs", "candidate.train", "candidate.release", "candidate.store", "best", "promote"} <= set(
        tasks
    )
    assert (mapped, before_best, before_analyze) == (["candidate"], ["candidate.store"], ["newest_runs"])
    assert before_promote == ["approve", "best"]


def test_the_weekly_calibration_is_mapped_over_device_types_and_loads_nothing_heavy(home: Path, tmp_path: Path) -> None:
    code = """
import json, sys
from airflow.sdk.definitions.mappedoperator import MappedOperator
from trainwright.dags.calibrate_pool import calibrate_pool as dag
from trainwright.operators import CalibrateOperator
task = dag.task_dict["calibrate"]
print(json.dumps({
    "heavy": [name for name in sys.argv[1].split() if name in sys.modules],
    "mapped": isinstance(task, MappedOperator) and task.operator_class is CalibrateOperator,
    "upstream": sorted(task.upstream_task_ids), "schedule": str(dag.schedule), "params": sorted(dag.params),
    "drift": [dag.params["most_drift"], CalibrateOperator(task_id="x").most_drift]}))
"""
    environment = os.environ | {"AIRFLOW_HOME": str(tmp_path / "airflow"), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    heavy = "torch numpy pandas scipy great_expectations dask horovod"
    done = subprocess.run(
        [sys.executable, "-c", code, heavy], capture_output=True, text=True, env=environment, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "heavy": [], "mapped": True, "upstream": ["device_types"], "schedule": "0 4 * * 0",
        "params": ["budget_s", "most_drift", "pool", "store"], "drift": [MOST_DRIFT, MOST_DRIFT],
    }  # fmt: skip


FIRST = """
import sys
from datetime import timedelta
from airflow.sdk import DAG
from airflow.sdk.timezone import utcnow
from airflow.serialization.serialized_objects import DagSerialization
import trainwright.dags.analyze_history, trainwright.dags.calibrate_pool, trainwright.dags.retrain
for module in (trainwright.dags.analyze_history, trainwright.dags.calibrate_pool, trainwright.dags.retrain):
    for dag in [one for one in vars(module).values() if isinstance(one, DAG) and one.schedule]:
        first = DagSerialization.from_dict(DagSerialization.to_dict(dag)).next_dagrun_info(last_automated_run_info=None)
        late = utcnow() - first.run_after
        print("first:", dag.dag_id, late < timedelta(days=0.7))  # a tenth of a week: a run just missed is made up for
"""


def test_what_runs_by_the_clock_does_not_begin_with_what_was_missed_before_it_was_there(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "nightly.yaml").write_text(
        "name: nightly\ndata: {uri: 'builtin:digits'}\nmodel: {source: m.py}\nschedule: {cron: '0 3 * * 3'}"
    )
    environment = os.environ | {"AIRFLOW_HOME": str(tmp_path / "airflow"), "TRAINWRIGHT_JOBS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, env=environment, check=True
    )  # fmt: skip
    told = {line.split()[1]: line.split()[2] for line in done.stdout.splitlines() if line.startswith("first:")}
    assert told == {"analyze_history": "True", "calibrate_pool": "True", "retrain_nightly": "True"}
