"""Calibration and step `estimate`: one curve per kind of device, measured if necessary."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import pytest
from torch import nn

from trainwright.estimator.predict.calibration import Calibration, load, save
from trainwright.estimator.predict.communication import HOROVOD_CYCLE_S, Link
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import BatchSpec, ModelDefinition
from trainwright.estimator.trace.trace import TrainingStepSpec, trace
from trainwright.infra.lock import locked
from trainwright.infra.memory_limit import usable_memory_bytes
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput
from trainwright.tasks.estimate import calibrate as step
from trainwright.tasks.estimate import link
from trainwright.tasks.estimate.calibrate import calibrate
from trainwright.tasks.estimate.pool_estimate import estimate
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.spec.pool import Device, Pool
from trainwright.tasks.spec.prices import Power


@pytest.fixture(scope="module")
def structure() -> Structure:
    images = BatchSpec(
        inputs={"inputs": (1, 8, 8)},
        input_dtypes={"inputs": "float32"},
        target_dtype="int64",
        classes=10,
        task="image-classification",
    )
    definition = ModelDefinition(
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(72, 10),
        ),
        None,
        None,
    )
    return trace(TrainingStepSpec(definition, {}, images, {"name": "adamw"}, "fp32"), 16)


@pytest.fixture(scope="module")
def measured(_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with a very short calibration of this machine, made at first use."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINWRIGHT_HOME", str(folder))
        step.cached(1, doors.settings()).parent.mkdir()
        shutil.copy(
            _made_once / "calibrations" / step.cached(1, doors.settings()).name,
            step.cached(1, doors.settings()),
        )
        patch.setattr(step, "FIRST_USE_S", 1.0)
        yield folder


@pytest.fixture(scope="module")
def calibration(measured: Path) -> Calibration:
    """This machine's calibration."""
    [kept] = (measured / "calibrations").iterdir()
    return load(kept)


def _device(
    number: int, type_: str, *, cores: float | None = None, speed: float | None = None
) -> Device:
    return Device(
        id=f"here/{type_}-{number}",
        type=type_,
        host="here",
        address="localhost",
        index=number,
        cores=cores,
        speed=speed,
    )


def test_a_calibration_states_its_quality(calibration: Calibration) -> None:
    assert (calibration.device_type, calibration.threads) == ("cpu", 1)
    assert calibration.measurements > 50
    assert calibration.sentinel_drift >= 0
    assert 0 <= calibration.cross_validated_error.median <= calibration.cross_validated_error.p90
    assert calibration.interval_quantile > 0
    assert calibration.duration_s > 0


def test_a_calibration_covers_the_operations_of_a_convolutional_network(
    calibration: Calibration, structure: Structure
) -> None:
    assert calibration.uncertainty(structure, 16).coverage == 1.0
    small, large = calibration.step_times_s(structure, [16, 512])
    assert large >= small > 0


def test_each_kind_of_device_gets_one_curve_and_its_calibration_is_named(
    calibration: Calibration, structure: Structure
) -> None:
    devices = [
        _device(0, "cpu", cores=1.0),
        _device(1, "cpu", cores=0.5),
        _device(2, "cpu", cores=0.5),
        _device(0, "emulated", speed=2.0),
        _device(0, "nvidia-t4"),
        _device(1, "nvidia-t4"),
    ]
    found = estimate(
        structure,
        devices,
        [calibration],
        power={"nvidia-t4": Power(idle_w=9, load_w=60)},
        settings=doors.settings(),
    )
    assert len(found.curves) == 4
    whole, half = found.curve(devices[0]), found.curve(devices[1])
    assert found.local_link is not None
    after_sum_s = found.local_link.after_sum_s
    assert half.median_s(64) - after_sum_s == pytest.approx(2 * (whole.median_s(64) - after_sum_s))
    assert found.curve(devices[3]).step_time_s(100) == pytest.approx(0.05)
    assert found.curve(devices[4]).mode == "datasheet"
    assert found.curve(devices[5]).load_w == 60
    assert found.mode == "datasheet"
    assert found.gradient_bytes == structure.parameter_bytes
    assert list(found.calibrations) == ["cpu, 1 thread(s)"]
    assert Estimate.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(("factor", "threads"), [(1.02, 1), (1.2, 2)])
def test_several_cores_compute_with_a_single_thread_if_it_is_as_fast(
    factor: float, threads: int, calibration: Calibration, structure: Structure
) -> None:
    slower = calibration.correction.model_copy(
        update={
            name: factor * getattr(calibration.correction, name)
            for name in ("scale", "per_op_s", "fixed_s")
        }
    )
    alone = calibration.model_copy(update={"correction": slower, "first_touch_s_per_byte": 0.0})
    both = calibration.model_copy(update={"threads": 2, "first_touch_s_per_byte": 0.0})
    device = _device(0, "cpu", cores=2.0)
    found = estimate(structure, [device], [both, alone], settings=doors.settings())
    assert found.curve(device).threads == threads
    assert set(found.calibrations) == {"cpu, 1 thread(s)", "cpu, 2 thread(s)"}
    one = estimate(structure, [device], [both], settings=doors.settings())
    assert one.curve(device).threads == 2


def test_local_memory_is_a_limit_and_a_notice_says_that_other_hosts_memory_is_unknown(
    structure: Structure,
) -> None:
    heard: list[dict[str, Any]] = []
    progress.listen(heard.append)
    here = _device(0, "emulated", speed=2.0)
    far = _device(1, "emulated", speed=1.0).model_copy(
        update={"host": "there", "address": "10.0.0.7"}
    )
    gpu = _device(0, "nvidia-t4").model_copy(update={"host": "gpus", "address": "10.0.0.8"})
    assert (
        estimate(structure, [here], settings=doors.settings()).curve(here).memory_limit_bytes
        == usable_memory_bytes()
    )
    assert heard == []
    assert (
        estimate(structure, [here, far, gpu], settings=doors.settings())
        .curve(far)
        .memory_limit_bytes
        is None
    )
    [said] = [event["message"] for event in heard]
    assert said.startswith("memory of there: unknown")
    alike = far.model_copy(update={"speed": 2.0})
    for order in ([here, alike], [alike, here]):
        found = estimate(structure, order, settings=doors.settings())
        assert found.curve(here).memory_limit_bytes == usable_memory_bytes()
        assert found.curve(alike).memory_limit_bytes is None


def test_stated_memory_limits_the_devices_of_its_host_alone(structure: Structure) -> None:
    entry = [{"type": "emulated", "speed": 1.0}]
    far = {"name": "far", "address": "10.0.0.7", "memory": "64GiB", "devices": entry}
    unknown = {"name": "unknown", "address": "10.0.0.8", "devices": entry}
    here = {"name": "here", "memory": "1GB", "devices": entry}
    pool = Pool.model_validate({"name": "p", "hosts": [far, unknown, here]})
    devices = pool.devices()
    found = estimate(structure, devices, settings=doors.settings())
    limits = [found.curve(device).memory_limit_bytes for device in devices]
    assert limits == [64 * 2**30, None, 1e9]


def test_only_calibrated_devices_make_a_calibrated_estimate(
    calibration: Calibration, structure: Structure
) -> None:
    found = estimate(
        structure, [_device(0, "cpu", cores=1.0)], [calibration], settings=doors.settings()
    )
    assert found.mode == "calibrated"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "tpu"}, "--device: got 'tpu'; torch finds here: cpu"),
        ({"threads": 0}, "--threads: got 0"),
        ({"budget_s": 0.0}, "--budget: got 0"),
    ],
)
def test_calibrate_refuses_impossible_options(
    options: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput) as raised:
        calibrate(tmp_path / "cpu.json", **{"budget_s": 1.0, **options})  # type: ignore[arg-type]
    assert says in str(raised.value)
    assert not (tmp_path / "cpu.json").exists()


def test_a_calibration_is_measured_once_with_progress(
    calibration: Calibration, measured: Path
) -> None:
    heard: list[dict[str, Any]] = []
    progress.listen(heard.append)
    assert step.calibration_for(1, doors.settings()) == calibration
    assert heard == []
    [kept] = (measured / "calibrations").iterdir()
    kept.unlink()
    again = step.calibration_for(1, doors.settings())
    assert any(event["event"] == "calibrate" for event in heard)
    assert load(kept) == again
    save(calibration, kept)


@pytest.mark.slow
def test_a_calibration_with_a_damaged_file_is_measured_again(
    calibration: Calibration, measured: Path
) -> None:
    heard: list[dict[str, Any]] = []
    progress.listen(heard.append)
    [kept] = (measured / "calibrations").iterdir()
    kept.write_text(kept.read_text()[:100])
    assert step.calibration_for(1, doors.settings()).measurements == calibration.measurements
    assert any(event["event"] == "calibrate" for event in heard)
    assert load(kept).threads == 1


def test_the_link_is_measured_once_if_two_devices_are_on_this_machine(
    calibration: Calibration, structure: Structure, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LINK_S", 0.3)
    one, two = [_device(0, "emulated", speed=1.0), _device(1, "emulated", speed=1.0)]
    elsewhere = two.model_copy(update={"host": "there", "address": "10.0.0.7"})
    assert estimate(structure, [one], settings=doors.settings()).local_link is None
    assert estimate(structure, [one, elsewhere], settings=doors.settings()).local_link is None
    assert not home.exists()
    found = estimate(structure, [one, two], settings=doors.settings()).local_link
    assert found is not None
    assert estimate(structure, [one, two], settings=doors.settings()).local_link == found
    [kept] = (home / "links").iterdir()
    kept.write_text(kept.read_text()[:20])
    assert estimate(structure, [one, two], settings=doors.settings()).local_link is not None
    assert Link.model_validate_json(kept.read_text()) == link.link_for_this_machine(
        doors.settings()
    )


def test_only_horovods_sums_wait_for_its_cycle(structure: Structure) -> None:
    device = _device(0, "emulated", speed=1.0)
    assert (
        estimate(structure, [device], backend="horovod", settings=doors.settings()).cycle_s
        == HOROVOD_CYCLE_S
    )
    assert estimate(structure, [device], backend="torch", settings=doors.settings()).cycle_s == 0


@pytest.mark.slow
def test_calibrate_and_share_measures_the_link_again(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LINK_S", 0.3)
    old = Link(bandwidth_bytes_per_s=1.0, latency_s=1.0, spread=0.0)
    link.link_file(doors.settings()).parent.mkdir(parents=True)
    link.link_file(doors.settings()).write_text(old.model_dump_json())
    assert link.link_for_this_machine(doors.settings()) == old
    step.calibrate_and_share(
        "cpu",
        1,
        doors.settings(),
        budget_s=1.0,
        most_drift=1e9,
        store=(tmp_path / "store").as_uri(),
    )
    assert link.link_for_this_machine(doors.settings()).latency_s < old.latency_s
    assert [one.name for one in link.link_file(doors.settings()).parent.iterdir()] == [
        link.link_file(doors.settings()).name
    ]


def test_a_process_that_waits_for_anothers_link_measurement_uses_its_result(home: Path) -> None:
    path = link.link_file(doors.settings())
    path.parent.mkdir(parents=True)
    theirs = Link(bandwidth_bytes_per_s=1.0, latency_s=1.0, spread=0.0)
    with ThreadPoolExecutor(1) as pool:
        with locked(path.with_name(f"{path.name}.lock"), wait=True):
            found = pool.submit(link.link_for_this_machine, doors.settings())
            with pytest.raises(TimeoutError):
                found.result(timeout=0.5)
            path.write_text(theirs.model_dump_json())
        assert found.result(timeout=60) == theirs


def test_a_link_that_can_not_be_cached_is_an_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LINK_S", 0.3)
    home.mkdir()
    (home / "links").touch()
    with pytest.raises(BadInput, match=r"TRAINWRIGHT_HOME: .*can't be written"):
        link.link_for_this_machine(doors.settings())
