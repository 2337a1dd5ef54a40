"""Predicts a training step on a device, over the batch size. Arithmetic on values; loads no torch.

Always named: `calibrated` (from measurements of the device), or `datasheet` (a roofline of the maker's figures, for a device
that nobody measured). For `emulated` devices it is what their definition says.
"""

from __future__ import annotations

from typing import Any, Literal

from trainwright.estimator.calibration import Calibration, op_count
from trainwright.estimator.curves import Affine, DeviceCurve
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
    low, high, coverage = 1.0, 1.0, 1.0
    if device_type == EMULATED:
        line = Affine(fixed=0.0, per_sample=EMULATED_SAMPLE_S / (speed or 1.0))
    elif calibration is not None:
        slower = calibration.threads / cores if cores is not None else 1.0
        line = _line([(b, slower * calibration.step_time_s(structure, b)) for b in _around(structure.batch_size)])
        coverage = calibration.coverage(structure, structure.batch_size)
        low, high = calibration.low_factor * coverage, calibration.high_factor * (2 - coverage)
    else:
        mode, coverage, low, high = "datasheet", 0.0, _DATASHEET_LOW, _DATASHEET_HIGH
        share = cores or 1.0
        line = _line([(b, _roofline(structure, device, b) / share) for b in _around(structure.batch_size)])
    share = (cores or 1.0) if device_type == "cpu" else 1.0
    idle, load = power_w or (device.idle_w * share, device.load_w * share)
    peak = structure.peak_memory_bytes
    return DeviceCurve(
        device_type=device_type,
        cores=cores,
        speed=speed,
        mode=mode,
        coverage=coverage,
        step_time_s=line,
        low_factor=low,
        high_factor=high,
        # the process, the tensors, and the buffer in which gradients are summed
        peak_memory_bytes=Affine(
            fixed=_PROCESS_BYTES + peak.fixed + structure.parameter_bytes, per_sample=peak.per_sample
        ),
        memory_safe_factor=_MEMORY_SAFE_FACTOR,
        memory_limit_bytes=device.memory_bytes,
        idle_w=idle,
        load_w=load,
        energy_source="datasheet",
    )


def _around(batch_size: int) -> list[int]:
    """The batch sizes through which the line is laid: those in use around the traced one."""
    return [size for size in _BATCHES if batch_size / 8 <= size <= batch_size * 8] or [batch_size, 2 * batch_size]


def _line(points: list[tuple[int, float]]) -> Affine:
    """The line of least squared relative error, neither part negative."""
    import numpy as np
    from scipy.optimize import nnls

    rows = np.array([[1 / seconds, size / seconds] for size, seconds in points])
    (fixed, per_sample), _ = nnls(rows, np.ones(len(points)))
    return Affine(fixed=float(fixed), per_sample=float(per_sample))


def _roofline(structure: Structure, device: DeviceType, batch_size: int) -> float:
    """Σ max(flops / reached F, bytes / reached B) + calls: the datasheet's guess."""
    peak = device.peak_flops[structure.precision] * _REACHED_FLOPS
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
        "step_time_s": time.model_dump(),
        "peak_memory_bytes": {
            "expected": curve.peak_memory_bytes(batch_size),
            "safe": curve.safe_memory_bytes(batch_size),
        },
        "energy_j": energy,
        "energy_source": curve.energy_source if energy is not None else None,
    }
