"""Shared by all tests: their own home, clean-up of processes, and the order of the files."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import doors
import pytest
from hypothesis import settings
from lab import lab  # noqa: F401 - a fixture
from shared_checker import SharedChecker
from shared_sandboxes import SharedServers
from slurm_lab import _slurm_cluster, slurm  # noqa: F401 - fixtures

from trainwright.estimator.machine import MOST_DRIFT
from trainwright.estimator.predict.calibration import save
from trainwright.infra.airflow import airflow_services, ensure_airflow_db, training_service
from trainwright.infra.background_process import stop
from trainwright.infra.lock import locked
from trainwright.infra.s3_server import S3Access, s3_service, start_s3
from trainwright.tasks import extract
from trainwright.tasks.data import model_schema
from trainwright.tasks.estimate import calibrate, link
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.validate import check

TESTS = Path(__file__).parent
LONGEST_FIRST = [
    TESTS / name
    for name in (
        "e2e/test_celery.py",
        "operators/test_training_survives.py",
        "e2e/test_chain.py",
        "docs/test_console_blocks.py",
        "tasks/train/hosts/test_slurm.py",
        "tasks/train/launcher/test_elastic.py",
        "tasks/train/pipeline/test_pipelines.py",
        "tasks/train/pipeline/test_compositions.py",
        "tasks/train/pipeline/test_elastic_pipelines.py",
        "e2e/test_airflow_tabs.py",
        "e2e/test_own_airflow.py",
        "tasks/recommend/test_recommend.py",
        "tasks/service/test_fuzz.py",
        "tasks/estimate/test_finished_runs.py",
        "tasks/export/circuits/test_export_circuit.py",
        "e2e/test_golden_runs.py",
        "e2e/test_contract.py",
        "tasks/train/pipeline/test_pipeline_trainings.py",
        "tasks/train/checkpoint/test_checkpoint_faults.py",
        "tasks/train/layouts/test_layout_faults.py",
        "tasks/train/hosts/test_hosts.py",
        "e2e/test_foreign_dags.py",
        "e2e/test_waiting.py",
        "e2e/test_calibrate_pool.py",
        "tasks/train/worker/test_torchrun.py",
        "tasks/train/launcher/test_lifecycle.py",
        "tasks/train/layouts/test_layout_trainings.py",
        "tasks/train/layouts/test_layout_changes.py",
        "tasks/train/pipeline/test_stage_state_memory.py",
        "tasks/train/layouts/test_resumed_layouts.py",
        "tasks/train/passes/test_recomputed.py",
        "tasks/train/pipeline/test_recomputed_stages.py",
        "tasks/inference/test_predict_rows.py",
        "tasks/recommend/test_network_templates.py",
        "tasks/recommend/test_training.py",
        "tasks/recommend/test_precisions.py",
        "tasks/recommend/test_recommend_step.py",
        "tasks/service/test_recommend_route.py",
        "tasks/train/checkpoint/test_killed.py",
        "tasks/train/rank/test_precision.py",
        "tasks/train/rank/test_joint_batch.py",
        "tasks/validate/test_validate.py",
        "tasks/validate/test_drift_step.py",
        "tasks/estimate/test_estimate.py",
        "tasks/estimate/test_calibrate.py",
        "tasks/allocate/test_replan.py",
        "e2e/test_foreign_dag.py",
        "e2e/test_registered_step.py",
        "tasks/service/test_page.py",
        "tasks/train/batch/test_batch_growth.py",
        "e2e/test_bad_model.py",
        "e2e/test_bad_input.py",
        "tasks/service/test_serve.py",
    )
]
"""Files that take over half a minute. If one started last, the other workers would be idle."""


# The CI profile everywhere: the same examples each time, and no deadline on a busy machine.
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """Ranks that are threads of a test set torch's default dtype, as a rank's process does."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_default_dtype(torch.float32)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails")


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.wasxfail
        vars(report).pop("wasxfail", None)  # or pytest doesn't count it as a failure
        report.outcome = "failed"
        report.longrepr = f"--no-skips: {report.nodeid}: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.config.getoption("--no-skips"):
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if collector.config.getoption("--no-skips"):
        _fail_if_skipped(report)
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process, before anything loads torch.

    Child processes react to SIGINT even if a shell runs pytest in the background. A computation
    takes one thread, here and in child processes that set no number: there are as many workers as
    cores, and threads that wait for each other at every operation take several times the CPU time.
    """
    config.pluginmanager.import_plugin("failed_first")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long files first, the others in collection order."""
    if gone := [str(path) for path in LONGEST_FIRST if not path.exists()]:
        raise pytest.UsageError(
            f"tests/conftest.py, LONGEST_FIRST: no such file: {', '.join(gone)}"
        )
    place = {path: number for number, path in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for no garbage while tests are collected, and later not in what is there already.

    A search would take seconds, and some tests need many.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _end(home: Path) -> None:
    stop([s3_service(home), *airflow_services(home), training_service(home)], grace_s=0)


@pytest.fixture(scope="session", autouse=True)
def _apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The session's own home. Removes variables that would point elsewhere."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("TRAINWRIGHT_", "AIRFLOW_"))]:
            patch.delenv(name)
        patch.setenv("TRAINWRIGHT_HOME", str(folder))
        yield folder
    _end(folder)


@pytest.fixture(scope="session", autouse=True)
def _shared_sandboxes() -> Iterator[None]:
    """One sandbox server traces all models of this process, and one reads data for all."""
    servers = SharedServers()
    with pytest.MonkeyPatch.context() as patch:
        for module in (extract, model_schema):
            patch.setattr(module, "call", servers.call)
        yield
    servers.close()


@pytest.fixture(scope="session", autouse=True)
def _shared_checker() -> Iterator[None]:
    """One process with Great Expectations checks all data of this process."""
    checker = SharedChecker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "exit_code", checker.exit_code)
        yield
    checker.close()


@pytest.fixture(autouse=True)
def _nobody_listens() -> Iterator[None]:
    """Remove progress listeners that a test leaves behind."""
    log = logging.getLogger("trainwright.progress")
    before = list(log.handlers)
    yield
    log.handlers[:] = before


@pytest.fixture(scope="session")
def _server(_apart: Path) -> S3Access:
    return start_s3(_apart)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty trainwright home for one test."""
    folder = tmp_path / "home"
    monkeypatch.setenv("TRAINWRIGHT_HOME", str(folder))
    yield folder
    if folder.exists():
        _end(folder)


@pytest.fixture
def s3(_server: S3Access, monkeypatch: pytest.MonkeyPatch) -> S3Access:
    """The session's S3 server. The environment points at it, whatever the home is."""
    monkeypatch.setenv("TRAINWRIGHT_S3_ENDPOINT", _server.endpoint)
    monkeypatch.setenv("TRAINWRIGHT_S3_ACCESS_KEY", _server.access_key)
    monkeypatch.setenv("TRAINWRIGHT_S3_SECRET_KEY", _server.secret_key)
    return _server


@pytest.fixture(scope="session")
def _made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that all workers share: Airflow's database, and a very short calibration.

    The progress events of making it are in the file `progress`.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made-once"
    ensure_airflow_db(folder, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINWRIGHT_HOME", str(folder))
        patch.setattr(calibrate, "FIRST_USE_S", 1.0)
        patch.setattr(link, "LINK_S", 0.3)
        made = calibrate.calibration_for(1, doors.settings())
        # Tests keep the machine busy, which must not cause another calibration. One core's
        # figures serve for any number of cores.
        calm = made.model_copy(update={"sentinel_drift": min(made.sentinel_drift, MOST_DRIFT)})
        with locked(folder / "calm.lock", wait=True):
            for threads in {1, *(kind["threads"] for kind in load_pool(None).kinds())}:
                save(
                    calm.model_copy(update={"threads": threads}),
                    calibrate.cached(threads, doors.settings()),
                )
        link.link_for_this_machine(doors.settings())
    return folder


@pytest.fixture(scope="session")
def stack(_apart: Path, _server: S3Access, _made_once: Path) -> Path:
    """The session's home, with a running S3 server. Tests share its contents."""
    airflow = _apart / "airflow"
    airflow.mkdir(mode=0o700, exist_ok=True)
    if not (airflow / "migrated").exists():
        for path in [
            *(_made_once / "airflow").glob("airflow.db*"),
            _made_once / "airflow" / "migrated",
        ]:
            shutil.copy2(path, airflow / path.name)
    for name in ("calibrations", "links"):
        shutil.copytree(_made_once / name, _apart / name, dirs_exist_ok=True)
    return _apart
