"""Predicts a training step on a device, over the batch size. Arithmetic on values; loads no torch.

Always named: `calibrated` (from measurements of the device), or `datasheet` (a roofline of the maker's figures, for a device
that nobody measured). For `emulated` devices it is what their definition says.
"""

from __future__ import annotations

from typing import Any, Literal

from trainwright.estimator.calibration import Calibration, op_count
from trainwright.estimator.curves import Basis, DeviceCurve, Knots, line_above, line_through
from trainwright.estimator.devices import DEVICE_TYPES, EMULATED, EMULATED_SAMPLE_S, DeviceType
from trainwright.estimator.structure import Structure

# What share of its peaks a device reaches in training, and how far off that is: a prior, wide on purpose. On held-out models the
# datasheet roofline was off by 73 % at the median and 86 % at the 90th percentile.
_REACHED_FLOPS = 0.35
_REACHED_BYTES = 0.6
_CALL_S = 8e-6
_DATASHEET_LOW, _DATASHEET_HIGH = 0.4, 3.5
_PROCESS_BYTES = (
    420 * 2**20
)  # of a rank before its model: torch, oneDNN, Horovod, TensorBoard, the readers of data (measured)
_MEMORY_SAFE_FACTOR = 1.25
_NAMED = 5  # unknown operations
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def predict_curve(
    structure: Structure,
    calibration: Calibration | None,
    *,
    device_type: str,
    cores: float | None = None,
    speed: float | None = None,
    power_w: tuple[float, float] | None = None,
) -> DeviceCurve:
    """The cost of a structure's training step on a device.

    `cores` is for cpu: below one, the device takes 1 / cores times as long as the core that was measured. `power_w` is
    (idle, load), and overrides the datasheet's.
    """
    device = DEVICE_TYPES[device_type]
    mode: Literal["calibrated", "datasheet"] = "calibrated"
    low, high, coverage, unknown = 1.0, 1.0, 1.0, tuple[str, ...]()
    basis = None
    sizes = _around(structure.batch_size)
    if device_type == EMULATED:
        times = [EMULATED_SAMPLE_S * size / (speed or 1.0) for size in sizes]
    elif calibration is not None:
        slower = calibration.threads / cores if cores is not None else 1.0
        times = [slower * seconds for seconds in calibration.step_times_s(structure, sizes)]
        coverage, kinds = calibration.coverage(structure, structure.batch_size)
        low, high = calibration.factors(structure, structure.batch_size)
        unknown = tuple(kinds[:_NAMED])
        basis = Basis(
            model=structure.fingerprint(),
            shares=calibration.shares(structure, structure.batch_size),
            calibration=calibration.sha256(),
            processor=calibration.processor,
            torch=calibration.torch,
        )
    else:
        mode, coverage, low, high = "datasheet", 0.0, _DATASHEET_LOW, _DATASHEET_HIGH
        times = [_roofline(structure, device, size) / (cores or 1.0) for size in sizes]
    share = (cores or 1.0) if device_type == "cpu" else 1.0
    idle, load = power_w or (device.idle_w * share, device.load_w * share)
    # the process, the tensors, and the buffer in which gradients are summed
    memory = [_PROCESS_BYTES + structure.parameter_bytes + structure.peak_bytes(size) for size in sizes]
    return DeviceCurve(
        device_type=device_type,
        cores=cores,
        speed=speed,
        mode=mode,
        coverage=coverage,
        unknown=unknown,
        step_time_s=line_through(sizes, times),
        time_knots=Knots(sizes=tuple(sizes), values=tuple(times)),
        low_factor=low,
        high_factor=high,
        peak_memory_bytes=line_above(sizes, memory),
        memory_knots=Knots(sizes=tuple(sizes), values=tuple(memory)),
        memory_safe_factor=_MEMORY_SAFE_FACTOR,
        memory_limit_bytes=device.memory_bytes,
        idle_w=idle,
        load_w=load,
        energy_source="datasheet",
        basis=basis,
    )


def _around(batch_size: int) -> list[int]:
    """The batch sizes at which a curve is known: those in use around the traced one, and that one."""
    near = [size for size in _BATCHES if batch_size / 8 <= size <= batch_size * 8]
    return sorted({*near, batch_size, 2 * batch_size})


def _roofline(structure: Structure, device: DeviceType, batch_size: int) -> float:
    """Σ max(flops / reached F, bytes / reached B) + calls: the datasheet's guess."""
    peak = device.peak_flops["bf16" if structure.precision == "amp" else structure.precision] * _REACHED_FLOPS
    bandwidth = device.bandwidth_bytes_per_s * _REACHED_BYTES
    work = sum(
        one.count * max(one.flops(batch_size) / peak, one.bytes(batch_size) / bandwidth) for one in structure.trace
    )
    return work + _CALL_S * op_count(structure)


def estimate_step(curve: DeviceCurve, batch_size: int) -> dict[str, Any]:
    """Time, memory and energy of one step, as `trainwright estimate --json` prints them."""
    time = curve.step_time(batch_size)
    energy = (time * curve.load_w).model_dump() if curve.load_w is not None else None
    return {
        "device_type": curve.device_type,
        "batch_size": batch_size,
        "mode": curve.mode,
        "coverage": curve.coverage,
        "learned_from": curve.learned_from,
        "unknown_operations": list(curve.unknown),
        "step_time_s": time.model_dump(),
        "peak_memory_bytes": {
            "expected": curve.memory_bytes(batch_size),
            "safe": curve.safe_memory_bytes(batch_size),
        },
        "energy_j": energy,
        "energy_source": curve.energy_source if energy is not None else None,
    }
