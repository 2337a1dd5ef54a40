"""Predicts a training step on a device as a function of the batch size. Arithmetic; no torch.

Each prediction names its mode: `calibrated` (from measurements of networks on the device),
`few-shot` (its datasheet, corrected by few measurements) or `datasheet` (nobody measured the
device). The time of `emulated` devices follows from their definition.
"""

from __future__ import annotations

import gc
import math
from typing import Any

from trainwright.estimator.curves import (
    Affine,
    Basis,
    DeviceCurve,
    Knots,
    LayerCost,
    LayerSeconds,
    Mode,
    line_above,
    line_through,
)
from trainwright.estimator.devices import (
    DEVICE_TYPES,
    EMULATED,
    EMULATED_SAMPLE_S,
    DeviceType,
    cores_used,
)
from trainwright.estimator.errors import BadInput
from trainwright.estimator.memory.step_memory import (
    PROCESS_BYTES,
    kept_bytes,
    peak_bytes,
    rising,
    safe_bytes,
)
from trainwright.estimator.predict.calibration import Calibration
from trainwright.estimator.predict.datasheet import RATE_WIDTH, reached
from trainwright.estimator.predict.energy import PowerDraw, datasheet_power, power_of, step_energy
from trainwright.estimator.predict.gpu_step import step_on_gpu
from trainwright.estimator.predict.layer_times import emulated_costs, layer_costs
from trainwright.estimator.predict.op_cost import Roofline
from trainwright.estimator.predict.step_work import cost_family
from trainwright.estimator.quantiles import NINETY
from trainwright.estimator.structure import Structure

# The 90 % interval of the datasheet's estimate: the widths of its priors, whose errors coincide.
_DATASHEET_FACTOR = math.exp(NINETY * RATE_WIDTH)
# A training is longer than the measurement, with records and evaluations. Without this room one
# held 7 MB (2 %) more than was bounded; with it, six ranks held 95 to 99 % of what was expected.
_RANK_ROOM = 1.1
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def predict_curve(
    structure: Structure,
    calibration: Calibration | None,
    *,
    device_type: str,
    cores: float | None = None,
    speed: float | None = None,
    power_w: tuple[float, float] | None = None,
    batch_size: int | None = None,
    by_layer: bool | None = None,
) -> DeviceCurve:
    """The cost of a structure's training step on a device, at batch sizes around the traced one.

    With `batch_size` it is computed only at that size and its double, which is faster, and not by
    layer unless `by_layer` says so.

    `cores` is for CPUs. With fewer cores than the calibration's threads, a step takes threads /
    cores times as long as measured; with more it takes the same time, because the number of threads
    is whole. `power_w` is (idle, load) and overrides measured power and the datasheet; its
    uncertainty is that of the datasheet.

    A structure and a calibration of different versions of torch give a wider interval and a note.
    Raises BadInput for a structure without operations.
    """
    if not structure.trace:
        raise BadInput(
            "structure: its trace is empty; allowed: at least one operation, as "
            "`trainwright extract` finds them"
        )
    _delay_collection()
    calibration, notes = _for_versions(structure, calibration)
    device = DEVICE_TYPES[device_type]
    run = step_on_gpu(structure) if device.is_gpu else structure
    mode: Mode = calibration.mode if calibration is not None else "calibrated"
    low, high, coverage, unknown = 1.0, 1.0, 1.0, tuple[str, ...]()
    basis = None
    at = batch_size or structure.batch_size
    sizes = [at, 2 * at] if batch_size is not None else _around(at)
    if device_type == EMULATED:
        times = [EMULATED_SAMPLE_S * size / (speed or 1.0) for size in sizes]
    elif calibration is not None:
        slower = max(1.0, calibration.threads / cores) if cores is not None else 1.0
        known, about = calibration.step(run, sizes, at)
        times = [slower * seconds for seconds in known]
        coverage, low, high, unknown = (
            about.coverage,
            about.low_factor,
            about.high_factor,
            about.unknown,
        )
        basis = Basis(
            model=structure.fingerprint(),
            shares=about.shares,
            calibration=calibration.sha256(),
            processor=calibration.processor,
            torch=calibration.torch,
        )
    else:
        mode, coverage, low, high = "datasheet", 0.0, 1 / _DATASHEET_FACTOR, _DATASHEET_FACTOR
        times = [sum(_roofline(run, device, size)) / cores_used(cores) for size in sizes]
    layers: tuple[tuple[LayerCost, ...], Affine] = ((), Affine(fixed=0.0, per_sample=0.0))
    if structure.layer_work and (batch_size is None if by_layer is None else by_layer):
        few = sorted({sizes[0], at, sizes[-1]})
        by_operation = (
            calibration.operation_times_s(run, few)
            if calibration is not None
            else [_roofline(run, device, size) for size in few]
        )
        layers = layer_costs(run, few, by_operation)
        if device_type == EMULATED:
            layers = emulated_costs(layers[0], at), Affine(fixed=0.0, per_sample=0.0)
    power = _power(device_type, calibration, cores, power_w)
    memory, kept = (
        [peak_bytes(structure, size) for size in sizes],
        kept_bytes(structure, device_type),
    )
    safe = rising(
        [
            safe_bytes(structure, size, expected)
            for size, expected in zip(sizes, memory, strict=True)
        ]
    )
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
        safe_memory_knots=Knots(sizes=tuple(sizes), values=tuple(safe)),
        process_bytes=_rank_bytes(calibration) + kept,
        kept_bytes=kept,
        memory_limit_bytes=device.memory_bytes,
        idle_w=power.idle_w,
        load_w=power.load_w,
        power_spread=power.spread,
        energy_source=power.energy_source,
        basis=basis,
        notes=notes,
        layers=layers[0],
        update=layers[1],
    )


def _rank_bytes(calibration: Calibration | None) -> float:
    """The memory of a rank besides its model: measured, with room, else the usual one."""
    measured = calibration.process_bytes if calibration is not None else None
    return _RANK_ROOM * measured if measured is not None else PROCESS_BYTES


def _for_versions(
    structure: Structure, calibration: Calibration | None
) -> tuple[Calibration | None, tuple[str, ...]]:
    """The calibration to use for a structure, and notes about different versions of torch."""
    if calibration is None:
        return None, ()
    if (note := calibration.torch_note()) is not None:
        return calibration, (note,)
    if structure.torch is None or structure.torch == calibration.torch:
        return calibration, ()
    note = (
        f"the structure was traced with torch {structure.torch}, the calibration is of "
        f"{calibration.torch}: the interval is wider, because operations may differ; "
        "`trainwright extract` traces again"
    )
    return calibration.wider(), (note,)


def _delay_collection() -> None:
    """Delay the next garbage collection by counting all present objects as old.

    After a structure is read, Python is due to collect, which takes as long as the arithmetic and
    finds nothing.
    """
    gc.freeze()
    gc.unfreeze()


def _power(
    device_type: str,
    calibration: Calibration | None,
    cores: float | None,
    power_w: tuple[float, float] | None,
) -> PowerDraw:
    """The given power, else the measured one, else the datasheet's, for a CPU's share of cores."""
    sheet = datasheet_power(device_type, cores)
    if power_w is not None:
        return sheet.model_copy(update={"idle_w": power_w[0], "load_w": power_w[1]})
    if calibration is None or calibration.power is None or device_type != calibration.device_type:
        return sheet
    return calibration.power * (
        min(1.0, cores / calibration.threads) if cores is not None and device_type == "cpu" else 1.0
    )


def _around(batch_size: int) -> list[int]:
    """The batch sizes of a curve's knots: usual ones around the traced one, and the traced one."""
    near = [size for size in _BATCHES if batch_size / 8 <= size <= batch_size * 8]
    return sorted({*near, batch_size, 2 * batch_size})


def _roofline(structure: Structure, device: DeviceType, batch_size: int) -> list[float]:
    """The datasheet's estimate of each operation's calls: latency + max(flops / F, bytes / B)."""
    took, rooflines = [], dict[tuple[str, str], Roofline]()
    for one in structure.trace:
        groups = one.dims.get("groups")
        what = (
            cost_family(one.family, {"groups": groups(batch_size)} if groups else {}),
            one.dtype,
        )
        if what not in rooflines:
            rooflines[what] = reached(device, *what)
        took.append(
            one.count * float(rooflines[what](one.flops(batch_size), one.bytes(batch_size)))
        )
    return took


def estimate_step(curve: DeviceCurve, batch_size: int) -> dict[str, Any]:
    """Time, memory and energy of one step, as `trainwright estimate --json` prints them.

    `compute_s` divides the median of `step_time_s`; None if the curve has no layers.
    `peak_memory_bytes` is the model's: `expected` of tensors alive at once, `safe` of resident
    memory above what the process held before. `process_bytes` is the rest of a rank;
    `device_memory_bytes` is `safe` plus `process_bytes`. `memory_limit_bytes` is the device type's
    memory, or None if it uses the machine's.
    """
    time = curve.step_time(batch_size)
    power = power_of(curve)
    energy = step_energy(time, power).model_dump() if power is not None else None
    return {
        "device_type": curve.device_type,
        "batch_size": batch_size,
        "mode": curve.mode,
        "coverage": curve.coverage,
        "learned_from": curve.learned_from,
        "unknown_operations": list(curve.unknown),
        "notes": list(curve.notes),
        "step_time_s": time.model_dump(),
        "compute_s": _by_phase(curve, batch_size) if curve.layers else None,
        "peak_memory_bytes": {
            "expected": curve.memory_bytes(batch_size),
            "safe": curve.safe_memory_bytes(batch_size),
        },
        "process_bytes": curve.process_bytes,
        "device_memory_bytes": curve.device_memory_bytes(batch_size),
        "memory_limit_bytes": curve.memory_limit_bytes,
        "energy_j": energy,
        "energy_source": curve.energy_source if energy is not None else None,
    }


def _by_phase(curve: DeviceCurve, batch_size: int) -> dict[str, float]:
    """Seconds of the forward pass, of both gradients, and of the optimizer."""
    layers, update_s = curve.layer_seconds(batch_size)
    phases = {name: sum(getattr(one, name) for one in layers) for name in LayerSeconds._fields}
    return {**phases, "update": update_s}
