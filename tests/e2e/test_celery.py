"""The DAG in an Airflow on PostgreSQL, Redis and Celery: its results, and what it survives."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import doors
import psutil
import pytest
import yaml
from airflow_client import AirflowClient, until
from airflow_whole import DAGS, STEPS_AN_EPOCH, write_job, write_pool
from browsing import browser
from celery_stack import AIRFLOW, CeleryStack, celery_stack

from trainwright.estimator.structure import Structure
from trainwright.infra.s3_server import S3Access
from trainwright.tasks.leases.ledger import Heartbeat, Holder
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run, list_runs
from trainwright.tasks.spec.job import load_job
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.store import verify
from trainwright.tasks.train.checkpoint import files as checkpoint
from trainwright.tasks.train.record.journal import Journals
from trainwright.tasks.train.record.metrics import read_rows

_log = logging.getLogger(__name__)
STEPS = {
    "validate",
    "recommend",
    "extract",
    "estimate",
    "allocate",
    "search_lr",
    "train",
    "release",
    "store",
    "analyze",
    "export",
    "promote",
}
TASKS = STEPS | {"approve"}
COMMIT_EVERY = 10
LASTING = 20
"""epochs of a training that is disturbed: over a minute"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@dataclass
class Site:
    """A running stack, its API, and a folder of job files."""

    stack: CeleryStack
    api: AirflowClient
    folder: Path
    _looked_at: Run | None = None

    def job(self, epochs: int, **fields: Any) -> Path:
        """Write a job file, named after the job."""
        return write_job(self.folder / "jobs", f"job-{secrets.token_hex(4)}", epochs, **fields)

    def lasting_job(self) -> Path:
        """Write a job file of a long training, and open its run with the first steps done.

        The first steps run once for all tests.
        """
        job = self.job(LASTING)
        run = doors.open_for(load_job(job), Holder("test", os.getpid()))
        if self._looked_at is None:
            doors.do(run, "estimate")
            self._looked_at = run
        else:
            for kind in (Validation, Structure, Estimate):
                run.write(self._looked_at.read(kind))
        doors.ledger().release(run.uri)
        return job

    def trains(self, job: Path, where: str, commits: int = 2) -> Run:
        """Wait until a job's run has stored this many checkpoints and continues to train."""

        def committed() -> Run | None:
            assert self.api("GET", where)["state"] not in ("success", "failed"), self.api.states(
                where
            )
            for run in list_runs(doors.settings().store, doors.settings(), job.stem):
                states = checkpoint.list_states(run.objects)
                if states and states[-1].step >= commits * COMMIT_EVERY:
                    return run
            return None

        return until(f"{commits} commits", committed, 600, lambda: str(self.api.states(where)))


@pytest.fixture(scope="module")
def _site(tmp_path_factory: pytest.TempPathFactory, _server: S3Access) -> Iterator[Site]:
    """The stack, with its own home and the session's S3 server. The ledger is in PostgreSQL."""
    home, folder = tmp_path_factory.mktemp("celery-home"), tmp_path_factory.mktemp("celery-files")
    for name in ("jobs", "pools"):
        (folder / name).mkdir()
    far = {
        "name": "far",
        "hosts": [{"name": "far", "address": "10.0.0.7", "devices": [{"type": "nvidia-t4"}]}],
    }
    (folder / "pools" / "far.yaml").write_text(
        yaml.safe_dump(far)
    )  # contains no device that could be calibrated here
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINWRIGHT_HOME", str(home))
        patch.setenv("TRAINWRIGHT_S3_ENDPOINT", _server.endpoint)
        patch.setenv("TRAINWRIGHT_S3_ACCESS_KEY", _server.access_key)
        patch.setenv("TRAINWRIGHT_S3_SECRET_KEY", _server.secret_key)
        patch.setenv("TRAINWRIGHT_POOLS", str(folder / "pools"))
        patch.setenv("TRAINWRIGHT_JOBS", str(folder / "jobs"))
        bundles = [
            {
                "name": "trainwright",
                "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
                "kwargs": {"path": str(DAGS)},
            }
        ]
        settings_of_airflow = {
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(bundles),
        }
        with celery_stack(home, DAGS, **settings_of_airflow) as stack:
            patch.setenv("TRAINWRIGHT_LEDGER", stack.ledger_url)
            api = AirflowClient(home)
            until("the DAG is read", api.has_dag)
            yield Site(stack, api, folder)


@pytest.fixture
def site(_site: Site) -> Site:
    """The stack with all its parts running, whatever an earlier test did."""
    _site.stack.start(*AIRFLOW)
    return _site


@dataclass
class Watch:
    """The training processes, sampled ten times a second inside the block."""

    most_launchers: int = 0
    most_of_a_rank: int = 0
    launchers: set[int] = field(default_factory=set)
    _end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.1):
            found = ranks()
            parents = {parent for _, parent in found}
            self.launchers |= parents
            self.most_launchers = max(self.most_launchers, len(parents))
            numbers = [number for number, _ in found]
            self.most_of_a_rank = max(
                [self.most_of_a_rank, *(numbers.count(number) for number in numbers)]
            )


def ranks() -> list[tuple[str, int]]:
    """The living ranks of this test's home: number and parent process."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            if (
                "trainwright.tasks.train.worker.entry" in words
                and words[-1].isdigit()
                and process.environ().get("TRAINWRIGHT_HOME") == str(doors.settings().home)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append((words[-1], process.ppid()))
    return found


def steps_done(run: Run) -> int:
    """The number of finished steps of rank 0, from its local journal and the store."""
    noted = [row for _, rows in Journals(run.work_folder()).parts(10**7) for row in rows]
    rows = [row for row in noted if row["rank"] == 0] + read_rows(run.objects, "steps-rank0")
    return 1 + max(row["step"] for row in rows)


def device_leases() -> list[str]:
    """The holders of devices."""
    return [lease.resource for lease in doors.ledger().held("device ")]


def assert_whole(run: Run, epochs: int) -> None:
    """Check that the run is sealed, has every step once, and holds no lease."""
    assert run.status().state == "success"
    assert verify(run).files
    steps = [row["step"] for row in read_rows(run.objects, "steps-rank0")]
    assert steps == list(range(epochs * STEPS_AN_EPOCH))
    assert doors.ledger().held() == []
    assert ranks() == []


def test_a_jobs_dag_has_small_xcoms_and_promotes_what_a_person_approves(site: Site) -> None:
    job = site.job(2, promotion={"alias": "production", "require_approval": True})
    dag = f"retrain_{job.stem}"
    until("the job has its DAG", lambda: site.api.has_dag(dag))
    where = site.api.start(dag)
    site.api.reached(where, "approve", "awaiting_input")
    site.api(
        "PATCH",
        f"{where}/taskInstances/approve/-1/hitlDetails",
        {"chosen_options": ["Approve"], "params_input": {}},
    )
    assert site.api.ended(where) == "success"
    assert site.api.states(where) == dict.fromkeys(TASKS, "success")
    (run,) = list_runs(doors.settings().store, doors.settings(), job.stem)
    for task in STEPS:
        reference = site.api.xcom(where, task)
        assert reference["run"] == run.uri
        assert len(json.dumps(reference)) < 4096
    links = site.api.links(where, "train")
    assert {"Run folder", "Plan", "Report", "TensorBoard"} == set(links)
    assert all(f"{job.stem}/{run.id}" in str(link) for link in links.values())
    assert "<html" in site.api.page(str(links["Report"]))
    assert site.api.xcom(where, "promote")["promoted"] is True
    for asset in (f"x-trainwright://models/{job.stem}{end}" for end in ("", "/production")):
        (event,) = site.api.events(asset)
        assert event["extra"]["run"] == run.uri
    assert_whole(run, 2)
    assert "postgresql" in doors.settings().ledger_url


def test_new_data_starts_a_run_whose_missed_deadline_is_reported(site: Site) -> None:
    job = site.job(
        2,
        queue_timeout="0s",
        objective={"minimize": "time", "deadline": "25s"},
        schedule={"on_new_data": True},
    )
    dag = f"retrain_{job.stem}"
    until("the job has its DAG", lambda: site.api.has_dag(dag))
    (data,) = site.api("GET", "/api/v2/assets?uri_pattern=x-trainwright://builtin/digits")["assets"]
    site.api("POST", "/api/v2/assets/events", {"asset_id": data["id"], "extra": {}})
    (where,) = until("new data starts a run", lambda: _runs(site.api, dag))
    alert = f"job {job.stem}: missed its deadline of 25 s: not done 25 s after it was queued"
    until("the alert is in the log", lambda: alert in site.stack.log("triggerer").read_text())
    assert site.api.ended(where) == "success"
    (run,) = list_runs(doors.settings().store, doors.settings(), job.stem)
    assert_whole(run, 2)


def test_a_lost_worker_costs_nothing_and_a_lost_launcher_only_uncommitted_steps(
    site: Site,
) -> None:
    job = site.lasting_job()
    with Watch() as watch:
        where = site.api.start(job=str(job))
        run = site.trains(job, where)
        site.stack.kill("worker")
        without_worker = steps_done(run)
        site.stack.start("worker")
        until("training goes on", lambda: steps_done(run) > without_worker + COMMIT_EVERY)
        (launcher,) = watch.launchers
        committed = checkpoint.list_states(run.objects)[-1].step
        psutil.Process(launcher).kill()  # its ranks end too
        reached = steps_done(run)
        assert site.api.ended(where) == "success", site.api.log(where, "train", 1)[-3000:]
    resumed = run.read(Result).resumed_from_step
    assert resumed is not None
    lost = reached - resumed
    tries = {one["task_id"]: one["try_number"] for one in site.api.instances(where)}
    _log.info(
        f"lost after step {reached}: {lost} steps done again, "
        f"tries of train {tries['train']}, {watch}"
    )
    assert tries["train"] == 2
    assert len(watch.launchers) == 2
    assert watch.most_launchers == 1
    assert watch.most_of_a_rank == 1
    assert resumed >= committed
    assert (
        lost <= COMMIT_EVERY + reached % COMMIT_EVERY
    )  # a commit that is being uploaded may also be lost
    assert_whole(run, LASTING)


def test_a_killed_triggerer_and_a_killed_scheduler_do_not_disturb_a_run_that_a_form_triggered(
    site: Site,
) -> None:
    devices = [
        device.resource for device in load_pool(str(write_pool(site.folder / "jobs"))).devices()
    ]
    queue, me = Queue(doors.ledger()), Holder("test", os.getpid())
    token = queue.take("test", me, devices, priority=9)
    assert token is not None
    with Heartbeat(doors.ledger(), "test", devices, holder=me.name, token=token):
        job = site.lasting_job()
        # The first job file gives the form its defaults, here and on the worker that reads the DAG.
        first = min(job.parent.glob("*.yaml")).stem
        form = "/api/v2/dags/retrain/details"
        until("the form is read", lambda: site.api("GET", form)["params"]["name"]["value"] == first)
        before = _runs(site.api, "retrain")
        with logged_in(site.api, f"{site.api.base}/dags/retrain") as page:
            trigger_by_form(page, {"job": str(job)})
        (where,) = until("the run is there", lambda: _runs(site.api, "retrain") - before)
        site.api.reached(where, "allocate", "deferred")
        site.stack.kill("triggerer")
        site.stack.start("triggerer")
        time.sleep(5)
        assert site.api.state(where, "allocate") == "deferred"
    doors.ledger().release("test", devices, token=token)
    with Watch() as watch:
        run = site.trains(job, where)
        site.stack.kill("scheduler")
        site.stack.start("scheduler")
        assert site.api.ended(where) == "success"
    assert {one["task_id"]: one["try_number"] for one in site.api.instances(where)}["train"] == 1
    assert (watch.most_launchers, len(watch.launchers)) == (1, 1)
    assert run.read(Result).resumed_from_step is None
    assert_whole(run, LASTING)
    with logged_in(site.api, f"{site.api.base}/dags/retrain") as page:
        page.get_by_role("button", name="Trigger").first.wait_for()
        page.goto(str(site.api.links(where, "train")["Plan"]))
        shares = page.locator('table[aria-label="Shares of a step"]')
        shares.wait_for()
        assert all(device.id in shares.inner_text() for device in run.read(Plan).devices)


def test_a_training_marked_failed_ends_even_without_a_triggerer_and_resumes_when_cleared(
    site: Site,
) -> None:
    job = site.lasting_job()
    where = site.api.start(job=str(job))
    run = site.trains(job, where)
    assert device_leases()
    marked = time.monotonic()
    site.api.set_state(where, "train", "failed")
    until("the ranks are gone", lambda: not ranks(), 60)
    gone_s = time.monotonic() - marked
    until(
        "the devices are free", lambda: not device_leases(), 60, lambda: str(site.api.states(where))
    )
    free_s = time.monotonic() - marked
    _log.info(
        f"ranks gone {gone_s:.1f} s, devices free {free_s:.1f} s after the task was marked failed"
    )
    assert site.api.ended(where) == "failed"
    assert site.api.state(where, "train") == "failed"
    assert doors.ledger().held() == []

    reached = checkpoint.list_states(run.objects)[-1].step
    site.api.clear(where, "train")
    until("training goes on", lambda: checkpoint.list_states(run.objects)[-1].step > reached)
    site.api.reached(where, "train", "deferred")
    site.stack.kill(
        "triggerer"
    )  # Airflow drops a trigger whose task has ended, and never calls its on_kill
    marked = time.monotonic()
    site.api.set_state(where, "train", "failed")
    until("the ranks are gone", lambda: not ranks())
    _log.info(
        f"ranks gone {time.monotonic() - marked:.1f} s after the task was marked failed "
        "without a triggerer"
    )
    assert site.api.ended(where) == "failed"
    assert site.api.state(where, "release") == "success"
    assert doors.ledger().held() == []
    assert run.status().state == "interrupted"


def _runs(api: AirflowClient, dag: str) -> set[str]:
    path = f"/api/v2/dags/{dag}/dagRuns"
    return {
        f"{path}/{quote(one['dag_run_id'])}" for one in api("GET", f"{path}?limit=100")["dag_runs"]
    }


@contextlib.contextmanager
def logged_in(api: AirflowClient, address: str) -> Iterator[Any]:
    """A headless browser's page at this address, after Airflow's login."""
    with browser() as chromium:
        page = chromium.new_page()
        page.set_default_timeout(200_000)
        page.goto(address)
        page.fill("input[name=username]", "admin")
        page.fill("input[name=password]", api.password)
        page.click("button[type=submit]")
        yield page


def trigger_by_form(page: Any, fields: dict[str, str]) -> None:
    """Fill in and send the trigger form on a DAG's page."""
    page.get_by_role("button", name="Trigger").first.click()
    for name, value in fields.items():
        page.locator(f"[name='element_{name}']").fill(value)
    form = page.locator("[role=dialog]:visible", has_text="Trigger Dag")
    form.get_by_role("button", name="Trigger").click()
    form.wait_for(state="hidden")
