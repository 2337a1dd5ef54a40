"""Waiting for devices in a complete Airflow: deferred, without a slot; preemption loses no step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import doors
import pytest
from airflow_client import AirflowClient, until
from airflow_whole import STEPS_AN_EPOCH, run_of, whole_airflow, write_job, write_pool

from trainwright.tasks.leases.ledger import Heartbeat, Holder
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.record.metrics import read_rows

EPOCHS = 20
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture
def airflow(stack: Path) -> Iterator[AirflowClient]:
    with whole_airflow(stack) as api:
        yield api


def _takes_no_slot(airflow: AirflowClient, run: str) -> bool:
    """Whether no task of a DAG run occupies a slot of the pool.

    The pool's own counts would include what earlier tests left in this Airflow.
    """
    pool = airflow("GET", "/api/v2/pools/default_pool")
    return not pool["include_deferred"] and not {"running", "queued"} & {
        *airflow.states(run).values()
    }


def test_a_deferred_run_waits_and_continues_and_a_preempted_training_loses_no_step(
    airflow: AirflowClient, tmp_path: Path
) -> None:
    devices = [device.resource for device in load_pool(str(write_pool(tmp_path))).devices()]
    queue, me = Queue(doors.ledger()), Holder("test", os.getpid())
    token = queue.take("test", me, devices, priority=9)
    assert token is not None

    with Heartbeat(doors.ledger(), "test", devices, holder=me.name, token=token):
        low = airflow.start(job=str(write_job(tmp_path, "low", EPOCHS)))
        airflow.reached(low, "allocate", "deferred")
        time.sleep(8)  # longer than the polling interval
        assert airflow.state(low, "allocate") == "deferred"
        until("no task takes a slot", lambda: _takes_no_slot(airflow, low), seconds=60)
    assert [(one.run, place) for place, (one, _) in enumerate(queue.waiting())] == [
        (run_of("low").uri, 0)
    ]  # type: ignore[union-attr]
    doors.ledger().release("test", devices, token=token)
    low_run = until(
        "low trains",
        lambda: (found := run_of("low")) and files.list_states(found.objects) and found,
    )

    until(
        "the training's progress is in the task's log, live",
        lambda: f"/{EPOCHS * STEPS_AN_EPOCH}  epoch" in airflow.log(low, "train"),
        60,
    )

    # The rival has a higher priority and requests devices at once; a second DAG run would be late.
    def asked() -> str:
        queue.look("rival", me, devices, len(devices), priority=5)
        return low_run.status().state

    until("low gave way", lambda: asked() == "interrupted")
    rival = queue.take("rival", me, devices, priority=5)
    assert rival is not None
    with Heartbeat(doors.ledger(), "rival", devices, holder=me.name, token=rival):
        kept = files.list_states(low_run.objects)[-1].step
        assert 0 < kept < EPOCHS * STEPS_AN_EPOCH
        time.sleep(8)
        assert low_run.status().state == "interrupted"
        assert (
            airflow.state(low, "train") == "deferred"
        )  # no worker slot during training or waiting
    doors.ledger().release("rival", devices, token=rival)
    until("low is done", lambda: airflow("GET", low)["state"] in ("success", "failed"))
    assert airflow("GET", low)["state"] == "success"
    assert low_run.read(Result).resumed_from_step == kept
    steps = [row["step"] for row in read_rows(low_run.objects, "steps-rank0")]
    assert steps == list(range(EPOCHS * STEPS_AN_EPOCH))
    assert doors.ledger().held() == []
    assert queue.waiting() == []
