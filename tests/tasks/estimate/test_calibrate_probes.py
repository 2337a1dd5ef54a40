"""Few-shot calibration with an energy meter. A thread advances a file in place of the counter."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import doors
import psutil
import pytest

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.predict.calibration import Calibration, load
from trainwright.estimator.structure import Structure
from trainwright.tasks.errors import BadInput, BusyMachine
from trainwright.tasks.estimate.calibrate import calibrate
from trainwright.tasks.estimate.pool_estimate import estimate
from trainwright.tasks.estimate.step import estimate_step
from trainwright.tasks.extract import extract_model
from trainwright.tasks.spec.job import ModelSpec
from trainwright.tasks.spec.pool import Device
from trainwright.tasks.spec.prices import Power

WAITING_W, WORKING_W = 40.0, 30.0
MODEL = """from torch import nn, rand, zeros


def build_model():
    return nn.Linear(8, 2)


def example_batch(n):
    return rand(n, 8), zeros(n).long()
"""


@pytest.fixture(scope="module")
def powercap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The counter of a socket that draws WAITING_W, plus WORKING_W per busy CPU of this test."""
    root = tmp_path_factory.mktemp("powercap")
    zone = root / "intel-rapl:0"
    zone.mkdir()
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text(f"{10**15}\n")
    counter, part = zone / "energy_uj", zone / "energy_uj.part"
    counter.write_text("0\n")
    stop = threading.Event()

    def advance() -> None:
        started, worked = time.monotonic(), 0.0
        before: dict[int, float] = {}
        while not stop.wait(0.02):
            for child in psutil.Process().children(recursive=True):
                try:
                    seconds = sum(child.cpu_times()[:2])
                except psutil.Error:
                    continue
                worked += seconds - before.get(child.pid, 0.0)
                before[child.pid] = seconds
            part.write_text(
                f"{int(1e6 * (WAITING_W * (time.monotonic() - started) + WORKING_W * worked))}\n"
            )
            part.replace(counter)

    thread = threading.Thread(target=advance)
    thread.start()
    yield root
    stop.set()
    thread.join()


@pytest.fixture(scope="module")
def probed(powercap: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very short few-shot calibration of this machine."""
    path = tmp_path_factory.mktemp("probed") / "few.json"
    calibrate(path, budget_s=1.0, probes=True, powercap=powercap, most_drift=1e9)
    return path


@pytest.fixture(scope="module")
def structure(tmp_path_factory: pytest.TempPathFactory) -> Structure:
    source = tmp_path_factory.mktemp("model") / "model.py"
    source.write_text(MODEL)
    return extract_model(ModelSpec(source=str(source)), doors.settings(), batch_size=16)


def device(type_: str, cores: float | None = None) -> Device:
    return Device(
        id=f"here/{type_}-0",
        type=type_,
        host="here",
        address="localhost",
        index=0,
        cores=cores,
        speed=None,
    )


def test_the_calibration_contains_the_measured_power(probed: Path) -> None:
    found = load(probed)
    assert found.mode == "few-shot"
    assert found.power is not None
    assert (found.power.source, found.power.energy_source) == ("rapl", "measured")
    assert 0 < found.power.idle_w <= 2 * WAITING_W
    assert found.power.load_w > found.power.idle_w
    assert found.power.spread > 0


def test_the_interval_of_measured_energy_includes_both_errors(
    probed: Path, structure: Structure
) -> None:
    found = load(probed)
    assert found.power is not None
    document = estimate_step(structure, doors.settings(), batch_size=16, calibration=found)
    time_s, energy_j = document["step_time_s"], document["energy_j"]
    assert (document["mode"], document["energy_source"]) == ("few-shot", "measured")
    assert energy_j["median"] == pytest.approx(time_s["median"] * found.power.load_w)
    assert energy_j["high"] == pytest.approx(
        time_s["high"] * found.power.load_w * (1 + found.power.spread)
    )
    assert energy_j["low"] == pytest.approx(
        time_s["low"] * found.power.load_w / (1 + found.power.spread)
    )


def test_datasheet_energy_is_labelled_and_has_a_wider_interval_than_time(
    structure: Structure,
) -> None:
    document = estimate_step(structure, doors.settings(), batch_size=16, device_type="nvidia-t4")
    time_s, energy_j = document["step_time_s"], document["energy_j"]
    assert (document["mode"], document["energy_source"]) == ("datasheet", "datasheet")
    assert energy_j["high"] / energy_j["median"] > 1.2 * time_s["high"] / time_s["median"]


def test_the_pool_files_power_overrides_the_measured_one(
    probed: Path, structure: Structure
) -> None:
    found = load(probed)
    [curve] = estimate(
        structure,
        [device("cpu", 1.0)],
        [found],
        power={"cpu": Power(idle_w=3, load_w=11)},
        settings=doors.settings(),
    ).curves
    assert (curve.idle_w, curve.load_w, curve.energy_source) == (3, 11, "datasheet")
    [half] = estimate(structure, [device("cpu", 0.5)], [found], settings=doors.settings()).curves
    assert found.power is not None
    assert half.load_w == pytest.approx(found.power.load_w / 2)
    assert half.energy_source == "measured"


def test_the_estimate_uses_a_gpus_probes_and_its_mode_is_that_of_its_least_certain_curve(
    probed: Path, structure: Structure
) -> None:
    cpu: Calibration = load(probed)
    gpu = cpu.model_copy(update={"device_type": "nvidia-t4", "power": None})
    found = estimate(
        structure, [device("cpu", 1.0), device("nvidia-t4")], [cpu, gpu], settings=doors.settings()
    )
    assert [curve.mode for curve in found.curves] == ["few-shot", "few-shot"]
    assert (found.mode, set(found.calibrations)) == ("few-shot", {"cpu, 1 thread(s)", "nvidia-t4"})
    assert found.curves[1].load_w == DEVICE_TYPES["nvidia-t4"].load_w
    assert (
        estimate(
            structure,
            [device("cpu", 1.0), device("nvidia-l4")],
            [cpu, gpu],
            settings=doors.settings(),
        ).mode
        == "datasheet"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget_s": 31.0}, "--budget: got 31; allowed with --probes: 1 to 30 s"),
        ({"budget_s": float("nan")}, "--budget: got nan"),
        ({"device": "cuda:99"}, "--device: got 'cuda:99'; torch finds here: cpu"),
        ({"threads": 0}, "--threads: got 0"),
    ],
)
def test_probing_refuses_impossible_options(
    options: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput) as raised:
        calibrate(tmp_path / "few.json", probes=True, **options)  # type: ignore[arg-type]
    assert says in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_busy_machine_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(BusyMachine, match=r"allowed: 0 %.*--most-drift"):
        calibrate(tmp_path / "few.json", budget_s=1.0, probes=True, most_drift=0.0)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_file_is_reported_before_the_measurement(
    tmp_path: Path,
) -> None:
    with pytest.raises(BadInput, match="is a folder or a device; allowed: a regular file"):
        calibrate(tmp_path, probes=True)
