"""A finished run's measurements are stored once, and the next prediction uses them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import pytest
from finished_run import finished_training

from trainwright.estimator.curves import Affine, Basis, DeviceCurve, Knots
from trainwright.estimator.machine import machine_key
from trainwright.estimator.predict.calibration import (
    Calibration,
    ErrorSummary,
    StepCorrection,
    save,
)
from trainwright.estimator.predict.correction import FinishedRun, learn
from trainwright.estimator.predict.loop_cost import LoopCost
from trainwright.estimator.predict.machine_speed import Speed
from trainwright.estimator.predict.op_cost import FamilyCost, Kernel, Roofline
from trainwright.infra.s3_server import S3Access
from trainwright.tasks import chain
from trainwright.tasks.allocate.preview import plan_job
from trainwright.tasks.allocate.step import release
from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.estimate import finished_runs
from trainwright.tasks.estimate.step import estimate_step
from trainwright.tasks.extract import extract_model
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.progress import listening
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.run_status import Manifest
from trainwright.tasks.runs.artefacts.training_result import Result, SplitEvent, split_since
from trainwright.tasks.runs.run import Run, open_run
from trainwright.tasks.spec.job import Job, load_job
from trainwright.tasks.storage.connect import open_store

TORCH = "2"  # as in `finished_run`'s runs
SIZES = (4, 16, 64)
NAME = "20260101T000001Z-abcdef.json"


@pytest.fixture
def store(tmp_path: Path, home: Path) -> str:
    return (tmp_path / "store").as_uri()


def _basis(**changes: str) -> Basis:
    facts = {"model": "m", "calibration": "0", "processor": "made up", "torch": TORCH} | changes
    return Basis.model_validate(facts | {"shares": {"matmul": 1.0}})


def _curve(cores: float = 1.0, **changes: Any) -> DeviceCurve:
    facts = {
        "device_type": "cpu",
        "cores": cores,
        "mode": "calibrated",
        "coverage": 1.0,
        "step_time_s": Affine(fixed=0.01, per_sample=0.0),
        "time_knots": Knots(sizes=SIZES, values=(0.01,) * 3),
        "low_factor": 0.7,
        "high_factor": 1.4,
        "peak_memory_bytes": Affine(fixed=1e6, per_sample=0.0),
        "memory_knots": Knots(sizes=SIZES, values=(1e6,) * 3),
        "memory_safe_factor": 1.1,
        "basis": _basis(),
    }
    return DeviceCurve.model_validate(facts | changes)


def _trained(store: str, number: int = 1, **changes: Any) -> Run:
    """A trained run on one core and half a core.

    Predicted: 10 ms and 1 MB each; measured: 15 ms and 1.2 MB.
    """
    run = finished_training(store, number=number)
    curves = [_curve(1.0, **changes), _curve(0.5, **changes)]
    run.write(Estimate(mode="calibrated", curves=curves, gradient_bytes=60.0))
    return run


def _objects(store: str) -> Any:
    return open_store(f"{store}/calibrations/cpu/runs", doors.settings())


def _notices(events: list[dict[str, Any]]) -> list[str]:
    return [one["message"] for one in events if one["event"] == "notice"]


@pytest.fixture
def progress() -> Iterator[list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    with listening(events.append):
        yield events


def test_a_finding_contains_the_measured_and_the_predicted_values(store: str) -> None:
    [uri] = finished_runs.append(_trained(store))
    assert uri == f"{store}/calibrations/cpu/runs/{NAME}"
    [found] = finished_runs.read(store, ["cpu"], doors.settings())
    assert [(one.cores, one.batch_size) for one in found.findings] == [(1.0, 32), (0.5, 16)]
    for one in found.findings:
        assert (one.predicted_step_time_s, one.measured_step_time_s.median) == (0.01, 0.015)
        assert (one.predicted_peak_memory_bytes, one.measured_peak_memory_bytes) == (1e6, 1.2e6)
        assert one.steps == 30  # the split never changed
    assert learn(_curve(), [found]).step_time(32).median > 0.01


def test_cpus_of_other_hosts_give_no_finding(
    store: str,
) -> None:
    run = _trained(store)
    plan = run.read(Plan)
    run.write(
        plan.model_copy(
            update={
                "devices": [one.model_copy(update={"address": "10.0.0.7"}) for one in plan.devices]
            }
        )
    )
    assert finished_runs.append(run) == []


def test_a_device_that_recomputes_gives_no_finding(store: str) -> None:
    run = _trained(store)
    plan = run.read(Plan)
    layout = Layout(
        pipelines=[
            Pipeline(
                micro_batches=[one.batch_size],
                stages=[Stage(device=one.id, layers=["net"], recompute=["net"])],
            )
            for one in plan.devices
        ]
    )
    run.write(plan.model_copy(update={"layout": layout}))
    assert finished_runs.append(run) == []


def test_a_stage_of_a_pipeline_gives_no_finding(store: str) -> None:
    run = _trained(store)
    plan = run.read(Plan)
    stages = [Stage(device=one.id, layers=["net"]) for one in plan.devices]
    stages += [Stage(device="elsewhere", layers=["head"])]
    layout = Layout(pipelines=[Pipeline(micro_batches=[8], stages=stages)])
    run.write(plan.model_copy(update={"layout": layout}))
    assert finished_runs.append(run) == []


def test_a_corrected_runs_finding_contains_the_uncorrected_prediction(store: str) -> None:
    corrected = {
        "calibrated_time_knots": Knots(sizes=SIZES, values=(0.02,) * 3),
        "learned_from": 3,
    }
    finished_runs.append(_trained(store, **corrected))
    [found] = finished_runs.read(store, ["cpu"], doors.settings())
    assert {one.predicted_step_time_s for one in found.findings} == {0.02}


def test_a_run_is_added_once_also_by_concurrent_callers(store: str) -> None:
    run = _trained(store)
    with ThreadPoolExecutor(8) as pool:
        named = list(pool.map(lambda _: finished_runs.append(doors.run_at(run.uri)), range(8)))
    before = _objects(store).get(NAME)
    finished_runs.append(run)
    assert {one for each in named for one in each} == {f"{store}/calibrations/cpu/runs/{NAME}"}
    assert [item.key for item in _objects(store).list()] == [NAME]
    assert _objects(store).get(NAME) == before


def test_a_run_killed_between_its_finding_and_its_seal_is_sealed_later_and_counted_once(
    store: str,
) -> None:
    run = _trained(store)
    finished_runs.append(run)
    assert not run.finished()
    run.note(state="interrupted")
    assert chain.run_step(doors.attach(run), chain.step("store"))["verified"]
    assert run.find(Manifest) is not None
    assert len(finished_runs.read(store, ["cpu"], doors.settings())) == 1


@pytest.mark.parametrize(
    "changes", [{"basis": None}, {"basis": _basis(torch="1")}, {"time_knots": None}]
)
def test_runs_without_a_calibration_or_with_another_torch_give_no_finding(
    store: str, changes: dict[str, Any]
) -> None:
    assert finished_runs.append(_trained(store, **changes)) == []
    assert finished_runs.read(store, ["cpu"], doors.settings()) == []


def test_steps_count_from_the_last_change_of_the_split_not_from_a_restart(
    store: str,
) -> None:
    run = _trained(store)
    result, planned = run.read(Result), [device.batch_size for device in run.read(Plan).devices]
    other = [planned[0] + 1, *planned[1:]]
    events = [
        SplitEvent(step=step, batch_sizes=split, reason="")
        for step, split in ((3, planned), (5, other), (9, other))
    ]
    for split_events, since in ((events, 5), (events[:1], 0), ([], 0)):
        run.write(result.model_copy(update={"split_events": split_events}))
        assert split_since(run.read(Result).split_events, planned) == since
    run.write(result.model_copy(update={"split_events": events}))
    finished_runs.append(run)
    (finished,) = finished_runs.read(store, ["cpu"], doors.settings())
    assert {one.steps for one in finished.findings} == {result.steps - 5}


def test_emulated_devices_give_no_finding(store: str) -> None:
    run = _trained(store)
    plan, result = run.read(Plan), run.read(Result)
    emulated = [
        one.model_copy(update={"type": "emulated", "cores": None, "speed": 1.0})
        for one in plan.devices
    ]
    run.write(plan.model_copy(update={"devices": emulated}))
    curve = _curve().model_copy(
        update={"device_type": "emulated", "cores": None, "speed": 1.0, "basis": None}
    )
    run.write(Estimate(mode="calibrated", curves=[curve], gradient_bytes=60.0))
    run.write(result)
    assert finished_runs.append(run) == []


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        (b"", "not used for predictions"),
        (b"\xff\xfe", "not used for predictions"),
        (b'{"run": "r", "device_type": "cpu"}', "findings: required field is missing"),
        (b'{"run": "r", "device_type": "nvidia-t4", "findings": []}', "for nvidia-t4"),
        (
            b'{"schema_version": 99, "run": "r", "device_type": "cpu", "findings": []}',
            "schema version 99",
        ),
        (b'{"run": "r", "device_type": "cpu", "findings": []}' + b" " * 1_000_000, "larger than"),
    ],
    ids=["empty", "not text", "cut short", "another device type", "a later version", "huge"],
)
def test_unreadable_findings_are_ignored_with_a_notice(
    store: str, progress: list[dict[str, Any]], damaged: bytes, says: str
) -> None:
    finished_runs.append(_trained(store))
    _objects(store).put("20260102T000000Z-abcdef.json", damaged)
    _objects(store).put("notes.txt", b"not a run")
    assert [one.run for one in finished_runs.read(store, ["cpu"], doors.settings())] == [
        f"{store}/runs/small/{NAME.removesuffix('.json')}"
    ]
    [notice] = _notices(progress)
    assert "20260102T000000Z-abcdef.json" in notice
    assert says in notice


def test_only_the_newest_runs_are_read(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished_runs, "NEWEST", 2)
    for number in (3, 1, 2):
        finished_runs.append(_trained(store, number))
    assert [
        one.run.split("Z")[0][-1] for one in finished_runs.read(store, ["cpu"], doors.settings())
    ] == ["2", "3"]


def test_an_object_is_fetched_once_and_again_if_its_copy_is_damaged(store: str, home: Path) -> None:
    finished_runs.append(_trained(store))
    first = finished_runs.read(store, ["cpu"], doors.settings())
    [copy] = (home / "calibration-sets").rglob("*.json")
    path = Path(store.removeprefix("file://")) / "calibrations/cpu/runs" / NAME
    whole = path.read_bytes()
    path.write_bytes(b"unread from here on")
    assert finished_runs.read(store, ["cpu"], doors.settings()) == first
    path.write_bytes(whole)
    copy.write_bytes(whole[:50])
    assert finished_runs.read(store, ["cpu"], doors.settings()) == first
    assert copy.read_bytes() == whole


def test_a_read_only_home_does_not_prevent_reading(store: str, home: Path) -> None:
    finished_runs.append(_trained(store))
    home.mkdir(exist_ok=True)
    (home / "calibration-sets").touch()
    assert len(finished_runs.read(store, ["cpu"], doors.settings())) == 1


def test_an_s3_server_also_stores_each_run_once(s3: S3Access, home: Path) -> None:
    store = "s3://test-calibration-set/somewhere"
    run = _trained(store)
    assert finished_runs.append(run) == finished_runs.append(doors.run_at(run.uri))
    [found] = finished_runs.read(store, ["cpu", "nvidia-t4"], doors.settings())
    assert isinstance(found, FinishedRun)
    assert learn(_curve(), [found]).step_time(32).median > 0.01


def test_an_unreachable_store_is_an_error_if_it_was_given(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("TRAINWRIGHT_S3_ACCESS_KEY", "k")
    monkeypatch.setenv("TRAINWRIGHT_S3_SECRET_KEY", "s")
    with pytest.raises(ServiceUnreachable):
        finished_runs.read("s3://nowhere", ["cpu"], doors.settings())


MODEL = """
import torch


def build_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(576, 10)
    )


def example_batch(size):
    return torch.rand(size, 1, 8, 8), torch.randint(0, 10, (size,))
"""
"""a model whose steps take far longer than the calibration `known` predicts"""


@pytest.fixture
def known(home: Path) -> Calibration:
    """A cached calibration that makes this machine look far faster than it is."""
    import importlib.metadata

    cost = FamilyCost(
        roofline=Roofline(latency_s=1e-6, flops_per_s=1e12, bytes_per_s=1e12),
        dims=(),
        kernel=Kernel(lengths=(None, None), family_sigma=0.5, kind_sigma=0.5, noise=0.1),
        kinds=("aten.mm",),
        points=((0.0, 0.0),),
        weights=(0.0,),
    )
    version = importlib.metadata.version("torch")
    made = Calibration(
        device_type="cpu",
        threads=1,
        dtype="float32",
        torch=version,
        processor="made up",
        created_at="now",
        measurements=1,
        duration_s=1.0,
        sentinel_drift=0.0,
        families={"elementwise": cost, "matmul": cost},
        kinds=("aten.mm",),
        correction=StepCorrection(),
        cross_validated_error=ErrorSummary(median=0.1, p90=0.2),
        step_deviation=0.15,
        interval_quantile=2.0,
        speed=Speed(compute_s=1e-3, memory_s=1e-3, calls_s=1e-4),
        loop=LoopCost(
            step_s=1e-3, tensor_s=1e-5, gradient_byte_s=0, input_byte_s=0, norm_s=0, norm_byte_s=0
        ),
    )
    save(made, home / "calibrations" / f"cpu-{machine_key()}-1-threads.json")
    return made


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """The model on one core."""
    (tmp_path / "m.py").write_text(MODEL)
    (tmp_path / "pool.yaml").write_text(
        "name: one\nhosts: [{name: here, address: localhost, devices: [{type: cpu, cores: 1.0}]}]\n"
    )
    return load_job(
        {
            "name": "small",
            "pool": str(tmp_path / "pool.yaml"),
            "data": {"uri": "builtin:digits"},
            "model": {"source": str(tmp_path / "m.py")},
            "train": {"epochs": 1, "global_batch_size": 32, "learning_rate": 0.01},
        }
    )


@pytest.mark.parametrize("store", ["s3://nowhere", "no store at all"])
def test_a_plan_without_a_store_says_that_it_is_uncorrected(
    store: str,
    job: Job,
    known: Calibration,
    monkeypatch: pytest.MonkeyPatch,
    progress: list[dict[str, Any]],
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_STORE", store)
    assert plan_job(job, doors.settings()).feasible
    assert any("no correction by finished runs" in notice for notice in _notices(progress))


@pytest.mark.slow
def test_the_second_run_of_a_model_is_predicted_closer_to_the_firsts_measurement(
    store: str, job: Job, known: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_STORE", store)
    before = plan_job(job, doors.settings())
    runs = []
    for _ in range(2):
        run = open_run(job, doors.settings(), Holder("me"), store, new=True)
        doors.do(run, "store")
        release(doors.attach(run))
        run.note(state="success")
        doors.ledger().release(run.uri)
        runs.append(run)
    first, second = (run.read(Estimate) for run in runs)
    assert (first.learned_from, second.learned_from, second.mode) == (0, 1, "calibrated")
    took = runs[0].read(Result).devices[0].step_time_s
    assert took is not None
    without, with_it = (one.curves[0].step_time(32).median for one in (first, second))
    assert abs(math.log(with_it / took.median)) < abs(math.log(without / took.median))
    assert len(finished_runs.read(store, ["cpu"], doors.settings())) == 2
    assert before.devices[0].step_time_s.median == pytest.approx(without)
    assert plan_job(job, doors.settings()).devices[0].step_time_s.median != pytest.approx(without)


def test_a_standalone_estimate_is_corrected_by_the_given_store(
    store: str, tmp_path: Path, known: Calibration
) -> None:
    (tmp_path / "m.py").write_text(MODEL)
    structure = extract_model(str(tmp_path / "m.py"), doors.settings(), batch_size=16)
    plain = estimate_step(structure, doors.settings(), batch_size=16, calibration=known)
    assert (
        estimate_step(structure, doors.settings(), batch_size=16, calibration=known, store=store)
        == plain
    )
    run = _trained(store)
    basis = _basis(torch=known.torch, model=structure.fingerprint(), processor="made up")
    run.write(
        Estimate(
            mode="calibrated",
            curves=[_curve(one, basis=basis) for one in (1.0, 0.5)],
            gradient_bytes=6.0,
        )
    )
    run.write(run.read(Result).model_copy(update={"versions": {"torch": known.torch}}))
    finished_runs.append(run)
    learned = estimate_step(
        structure, doors.settings(), batch_size=16, calibration=known, store=store
    )
    assert (plain["learned_from"], learned["learned_from"]) == (0, 1)
    assert learned["step_time_s"]["median"] > plain["step_time_s"]["median"]
