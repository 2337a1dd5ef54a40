"""Reading meters. A folder of files replaces sysfs, and a module replaces NVML."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.errors import BadInput
from trainwright.estimator.measure.energy_meter import EnergyMeter, measured_power, meter_for

RANGE_UJ = 262_143_328_850


def fake_zone(root: Path, zone: str, name: str, energy_uj: int) -> Path:
    """A zone of a stand-in for /sys/class/powercap; its counter's file."""
    folder = root / zone
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder / "energy_uj"


def rapl(root: Path) -> EnergyMeter:
    meter = meter_for("cpu", rapl_root=root)
    assert meter is not None
    assert meter.source == "rapl"
    return meter


def test_each_socket_and_its_memory_are_counted_once(tmp_path: Path) -> None:
    counters = {
        name: fake_zone(tmp_path, zone, name, 1000)
        for zone, name in {
            "intel-rapl:0": "package-0",
            "intel-rapl:0:0": "core",
            "intel-rapl:0:1": "dram",
            "intel-rapl:1": "package-1",
            "intel-rapl:2": "psys",
            "intel-rapl-mmio:0": "package-0-mmio",
        }.items()
    }
    meter = rapl(tmp_path)
    for number, counter in enumerate(counters.values()):
        counter.write_text(str(1000 + 10**number * 1_000_000))
    assert meter.read_j() == pytest.approx(1 + 100 + 1000)  # package-0, dram, package-1
    assert meter.read_j() == pytest.approx(1101)


@given(
    taken_uj=st.lists(st.integers(0, RANGE_UJ - 1), max_size=12), at_uj=st.integers(0, RANGE_UJ - 1)
)
def test_a_counter_that_wraps_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, taken_uj: list[int], at_uj: int
) -> None:
    root = tmp_path_factory.mktemp("powercap")
    counter = fake_zone(root, "intel-rapl:0", "package-0", at_uj)
    meter = rapl(root)
    for number, taken in enumerate(taken_uj, start=1):
        at_uj = (at_uj + taken) % RANGE_UJ
        counter.write_text(str(at_uj))
        assert meter.read_j() == pytest.approx(sum(taken_uj[:number]) * 1e-6, abs=1e-6)


def test_without_readable_counters_there_is_no_meter(
    tmp_path: Path,
) -> None:
    assert meter_for("cpu", rapl_root=tmp_path / "absent") is None
    fake_zone(tmp_path / "core", "intel-rapl:0:0", "core", 0)
    assert meter_for("cpu", rapl_root=tmp_path / "core") is None
    counter = fake_zone(tmp_path / "closed", "intel-rapl:0", "package-0", 0)
    counter.unlink()
    counter.mkdir()  # can't be read, even by root
    assert meter_for("cpu", rapl_root=tmp_path / "closed") is None
    fake_zone(tmp_path / "odd", "intel-rapl:0", "package-0", 0).write_text("unknown")
    assert meter_for("cpu", rapl_root=tmp_path / "odd") is None


def test_a_counter_that_disappears_is_an_error(tmp_path: Path) -> None:
    counter = fake_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = rapl(tmp_path)
    counter.unlink()
    with pytest.raises(OSError, match="energy_uj"):
        meter.read_j()


class NVMLError(Exception):
    """The error that the stand-in for NVML raises."""


def fake_nvml(monkeypatch: pytest.MonkeyPatch, energy_mj: dict[int, int | None]) -> None:
    """A stand-in for pynvml with these devices; None: the device counts no energy."""
    module = ModuleType("pynvml")

    def handle(uuid: str) -> int:
        index = int(uuid.removeprefix("GPU-"))
        if index not in energy_mj:
            raise NVMLError("Invalid Argument")
        return index

    def energy(device: int) -> int:
        found = energy_mj[device]
        if found is None:
            raise NVMLError("Not Supported")
        return found

    vars(module).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_nvml_counts_joules_of_the_requested_device(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[int, int | None] = {0: 5_000_000, 1: 70_000, 2: None}
    fake_nvml(monkeypatch, counts)
    meter = meter_for("nvidia-t4", "GPU-1")
    assert meter is not None
    assert (meter.source, meter.read_j()) == ("nvml", 70.0)
    counts[1] = 71_500
    assert meter.read_j() == 71.5
    assert meter_for("nvidia-m40-12gb", "GPU-2") is None
    assert meter_for("nvidia-t4", "GPU-3") is None
    counts[1] = None
    with pytest.raises(OSError, match="NVML"):
        meter.read_j()


def test_without_nvml_there_is_no_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert meter_for("nvidia-h200", "GPU-0") is None


@pytest.mark.parametrize("device_type", ["emulated", "amd-mi300x"])
def test_devices_without_an_energy_counter_have_no_meter(device_type: str) -> None:
    assert meter_for(device_type) is None


class Socket:
    """A stand-in for a meter and its clock: it draws 20 W idle, and 55 W at work."""

    source = "rapl"

    def __init__(self) -> None:
        self.now_s = self.energy_j = 0.0

    def spend(self, seconds: float, power_w: float) -> None:
        self.now_s += seconds
        self.energy_j += seconds * power_w

    def read_j(self) -> float:
        return self.energy_j


@pytest.mark.parametrize(("share", "idle_w", "load_w"), [(1.0, 20.0, 55.0), (0.25, 5.0, 40.0)])
def test_power_is_measured_idle_and_at_work_and_idle_power_is_shared(
    share: float, idle_w: float, load_w: float
) -> None:
    socket = Socket()
    power = measured_power(
        socket,  # type: ignore[arg-type]
        lambda: socket.spend(0.3, 55.0),
        duration_s=2.0,
        idle_share=share,
        clock=lambda: socket.now_s,
        sleep=lambda seconds: socket.spend(seconds, 20.0),
    )
    assert (power.idle_w, power.load_w) == (pytest.approx(idle_w), pytest.approx(load_w))
    assert (power.source, power.energy_source, power.spread) == ("rapl", "measured", 0.0)


def test_a_meter_for_an_unknown_device_type_is_refused() -> None:
    with pytest.raises(BadInput, match="device type: got 'tpu'; allowed: amd-mi300x"):
        meter_for("tpu")
