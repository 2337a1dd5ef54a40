"""The overhead of the DAG beyond its steps' own work, against a hello-world DAG of the same shape.

    python tests/benchmarks/dag_overhead.py [--rounds 4] [--celery]

Both DAGs run in one Airflow (the embedded one, or PostgreSQL, Redis and a Celery worker), in turns
and in random order, after one warm-up run each. The hello-world DAG has the tasks and dependencies
of `retrain`, in a separate file; each task returns a word.

    overhead = (end of the DAG run - its queueing) - sum of the steps' seconds in the run's status,
               for the steps on the longest path

A step's own work is that of its function in `trainwright.tasks`, the same as at the command line:
it includes the function's imports and the processes that it starts (Great Expectations, tracing,
the ranks). The overhead is all else: Airflow's loops, processes and queries, parsing the DAG file,
operators and their imports, the start-up of the training process, deferral, and noticing the end
of the training.

Below the overhead it prints, per task, the median seconds outside and inside the step's own work;
the rest is between tasks.

The noise floor is the same ratio between two random halves of the hello-world runs: the range of
95 % of 2,000 draws.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from trainwright.infra import local
from trainwright.infra.s3_server import start_s3, stop_s3

E2E, DAGS = Path(__file__).parents[1] / "e2e", Path(__file__).parents[2] / "dags"
sys.path[:0] = [str(E2E.parent), str(E2E)]

import doors  # noqa: E402
from airflow_client import AirflowClient, until  # noqa: E402
from celery_stack import celery_stack  # noqa: E402

BAR = 1.15
RETRAIN = """
from trainwright.dags.retrain import retrain  # the airflow DAG
"""
HELLO = """
from datetime import UTC, datetime
from airflow.sdk import DAG, BaseOperator

class HelloOperator(BaseOperator):
    def execute(self, context):
        return "hello"

with DAG(
    "hello",
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    is_paused_upon_creation=False,
):
    tasks = {{name: HelloOperator(task_id=name) for name in {after}}}
    for name, names in {after}.items():
        for other in names:
            tasks[name] >> tasks[other]
"""


@contextlib.contextmanager
def airflow(home: Path, dags: Path, *, celery: bool) -> Iterator[AirflowClient]:
    """A running Airflow with its own home."""
    os.environ["TRAINWRIGHT_HOME"] = str(home)
    os.environ["AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE"] = "False"
    os.environ["AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL"] = "5"
    try:
        if celery:
            start_s3(home)
            with celery_stack(home, dags) as stack:
                os.environ["TRAINWRIGHT_LEDGER"] = stack.ledger_url
                yield AirflowClient(home)
        else:
            local.up(home, dags)
            yield AirflowClient(home)
    finally:
        local.down(home)
        stop_s3(home)


def overhead_s(
    api: AirflowClient, dag: str, job: Path
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Run a DAG; its overhead, the overhead within each task, and the seconds of its steps."""
    where = api.start("hello") if dag == "hello" else api.start(job=str(job), new=True)
    assert api.ended(where, 900) == "success", api.states(where)
    run = api("GET", where)
    took_s = (_time(run["end_date"]) - _time(run["queued_at"])).total_seconds()
    own = {} if dag == "hello" else doors.run_at(api.xcom(where, "validate")["run"]).status().steps
    within = {
        one["task_id"]: (_time(one["end_date"]) - _time(one["start_date"])).total_seconds()
        - own.get(one["task_id"], 0.0)
        for one in api.instances(where)
    }
    # `release` runs in parallel with later tasks, so it is not on the longest path
    beside = sum(seconds for name, seconds in own.items() if name == "release")
    return took_s - sum(own.values()) + beside, within, own


def _time(text: Any) -> datetime:
    return datetime.fromisoformat(str(text))


def noise(hello: list[float]) -> tuple[float, float]:
    """The range of 95 % of the ratios between the medians of two random halves."""
    drawn = []
    for _ in range(2000):
        mixed = random.sample(hello, len(hello))
        drawn.append(statistics.median(mixed[::2]) / statistics.median(mixed[1::2]))
    drawn.sort()
    return drawn[50], drawn[-51]


def main() -> None:
    """Print both overheads and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--celery", action="store_true", help="on PostgreSQL, Redis and a Celery worker"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(
        prefix="trainwright-overhead-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        (folder / "dags").mkdir()
        (folder / "dags" / "retrain_too.py").write_text(RETRAIN)
        job = folder / "job.yaml"
        job.write_text(
            yaml.safe_dump(
                {
                    "name": "overhead",
                    "pool": str(DAGS / "pools" / "two-cpus.yaml"),
                    "data": {"uri": "builtin:digits"},
                    "model": {"source": str(DAGS / "jobs" / "cnn.py"), "config": {"width": 8}},
                    "train": {"epochs": 1, "global_batch_size": 96, "learning_rate": 0.003},
                    "objective": {"minimize": "time"},
                    "devices": {"min_count": 2},
                }
            )
        )
        with airflow(folder / "home", folder / "dags", celery=given.celery) as api:
            until("retrain is read", api.has_dag)
            after = {
                one["task_id"]: one["downstream_task_ids"]
                for one in api("GET", "/api/v2/dags/retrain/tasks")["tasks"]
            }
            (folder / "dags" / "hello.py").write_text(HELLO.format(after=after))
            until("hello is read", lambda: api.has_dag("hello"))
            found: dict[str, list[float]] = {"hello": [], "retrain": []}
            parts: dict[str, list[dict[str, float]]] = {"hello": [], "retrain": [], "own": []}
            for number in range(given.rounds + 1):
                for dag in random.sample(sorted(found), 2):
                    seconds, within, own = overhead_s(api, dag, job)
                    warm_up = "  (warm-up)" if number == 0 else ""
                    print(f"  round {number}  {dag:8} {seconds:7.2f} s{warm_up}", flush=True)
                    if number:
                        found[dag].append(seconds)
                        parts[dag].append(within)
                        if own:
                            parts["own"].append(own)
    hello, ours = (statistics.median(found[dag]) for dag in ("hello", "retrain"))
    low, high = noise(found["hello"])
    where = "Celery" if given.celery else "LocalExecutor"
    print(f"{where}, {len(after)} tasks, {given.rounds} rounds, medians")
    for label, dag, middle in (("hello world", "hello", hello), ("retrain", "retrain", ours)):
        span = f"from {min(found[dag]):.2f} to {max(found[dag]):.2f}"
        print(f"  {label:12}{middle:9.2f} s   {span}{', beyond its steps' * (dag == 'retrain')}")
    for name in after:
        of_hello, of_ours, own_s = (
            statistics.median(one.get(name, 0.0) for one in parts[key]) for key in parts
        )
        print(f"    {name:12}{of_hello:6.2f} s  {of_ours:6.2f} s   its step {own_s:6.2f} s")
    print(f"  ratio         {ours / hello:7.2f}     bar {BAR}; noise floor {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
