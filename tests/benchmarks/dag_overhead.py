"""What the DAG costs beyond its steps' own work, against a hello-world DAG of the same shape.

    python tests/benchmarks/dag_overhead.py [--rounds 4] [--celery]

Both run in one Airflow (the embedded one, or PostgreSQL, Redis and a Celery worker), by turns in random order, after one of each
that does not count. The hello-world DAG has the tasks and dependencies of `retrain`, in a file of its own; each returns a word.

    overhead = DAG run, from queued to ended, - seconds that the steps of the run's status took (those on the longest path)

A step's own work is what its function in `trainwright.tasks` does, which is the same at the command line: what that imports, and
the processes that it starts to do it (Great Expectations', tracing's, the ranks'), are part of it. All else is overhead:
Airflow's loops, processes and look-ups, reading the DAG file, operators and what they import, the start of the process that
trains until it begins to, deferral, seeing that it has ended, the way back.

Below it, where the time goes: seconds within each task that are not its step's own, and the step's own (medians); the rest lies
between tasks.

The noise floor is the same ratio between two random halves of the hello-world runs, 95 % of 2,000 draws.
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

import doors
import yaml

from trainwright.infra import local
from trainwright.infra.s3_server import start_s3, stop_s3

E2E, DAGS = Path(__file__).parents[1] / "e2e", Path(__file__).parents[2] / "dags"
sys.path.insert(0, str(E2E))

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

with DAG("hello", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False, is_paused_upon_creation=False):
    tasks = {{name: HelloOperator(task_id=name) for name in {after}}}
    for name, names in {after}.items():
        for other in names:
            tasks[name] >> tasks[other]
"""


@contextlib.contextmanager
def airflow(home: Path, dags: Path, *, celery: bool) -> Iterator[AirflowClient]:
    """A running Airflow with a home of its own."""
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
    """Run a DAG; the seconds it took beyond its steps' own work, how many of them each task did, and its steps' own."""
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
    beside = sum(
        seconds for name, seconds in own.items() if name == "release"
    )  # it runs beside what follows
    return took_s - sum(own.values()) + beside, within, own


def _time(text: Any) -> datetime:
    return datetime.fromisoformat(str(text))


def noise(hello: list[float]) -> tuple[float, float]:
    """Where 95 % of the ratios of medians of two random halves lie."""
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
                    print(
                        f"  round {number}  {dag:8} {seconds:7.2f} s{'  (warm-up)' if number == 0 else ''}",
                        flush=True,
                    )
                    if number:
                        found[dag].append(seconds)
                        parts[dag].append(within)
                        if own:
                            parts["own"].append(own)
    hello, ours = (statistics.median(found[dag]) for dag in ("hello", "retrain"))
    low, high = noise(found["hello"])
    print(
        f"{'Celery' if given.celery else 'LocalExecutor'}, {len(after)} tasks, {given.rounds} rounds, medians"
    )
    print(
        f"  hello world   {hello:7.2f} s   from {min(found['hello']):.2f} to {max(found['hello']):.2f}"
    )
    print(
        f"  retrain       {ours:7.2f} s   from {min(found['retrain']):.2f} to {max(found['retrain']):.2f}, beyond its steps"
    )
    for name in after:
        of_hello, of_ours, own_s = (
            statistics.median(one.get(name, 0.0) for one in parts[key]) for key in parts
        )
        print(f"    {name:12}{of_hello:6.2f} s  {of_ours:6.2f} s   its step {own_s:6.2f} s")
    print(f"  ratio         {ours / hello:7.2f}     bar {BAR}; noise floor {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
