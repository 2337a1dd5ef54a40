"""Compares what was predicted for a run with what it measured."""

from __future__ import annotations

import math
from typing import Any

from trainwright.estimator.curves import DeviceCurve
from trainwright.tasks.allocate.recompute.recomputing_curves import RecomputingCurves
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan, PlannedDevice
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.units import is_unknown


def predicted_and_measured(
    result: Result, estimate: Estimate | None, plan: Plan | None
) -> list[dict[str, Any]]:
    """Each predicted quantity with the measured one, the error, and whether the interval held."""
    rows = []
    predicted = result.predicted
    currency = (plan.currency if plan is not None else None) or "units"
    if predicted is not None:
        step = result.measured.step_time_s
        for name, unit, guess, seen in (
            ("step time", "s", predicted.step_time_s, step.median if step else None),
            ("duration", "s", predicted.duration_s, result.measured.duration_s),
            ("energy", "J", predicted.energy_j, result.measured.energy_j),
            ("cost", currency, predicted.cost, result.measured.cost),
        ):
            if guess is None:
                continue
            row = _compared(name, unit, guess.median, guess.low, guess.high, seen)
            if result.early_stopped is not None and name != "step time":  # predicted for all epochs
                row |= {"error": None, "inside": None}
            rows.append(row)
    for device, planned in zip(result.devices, plan.devices if plan else [], strict=False):
        curve = _as_planned(estimate, plan, planned)
        if curve is not None:  # the devices of a replayed plan may not be in the estimate
            # The memory of a micro-batch, plus the accumulated gradients (see
            # `CostModel.memory_bytes`).
            pieces = plan.accumulation if plan else 1
            size = math.ceil(device.batch_size / pieces)
            kept = estimate.gradient_bytes if estimate and pieces > 1 else 0.0
            expected = curve.memory_bytes(size) + curve.process_bytes + kept
            safe = curve.device_memory_bytes(size) + kept
            rows.append(
                _compared(
                    f"memory of {device.id}", "B", expected, 0.0, safe, device.peak_memory_bytes
                )
            )
            if device.step_time_s is not None:
                time = curve.step_time(device.batch_size, pieces)
                # A share of a core is not used up while the rank waits for others: its next step
                # may be as fast as on a whole core.
                share = min(1.0, planned.cores or 1.0) if len(result.devices) > 1 else 1.0
                name = f"own step time of {device.id}, {device.batch_size} samples"
                rows.append(
                    _compared(
                        name,
                        "s",
                        time.median,
                        share * time.low,
                        time.high,
                        device.step_time_s.median,
                    )
                )
    return rows


def _as_planned(
    estimate: Estimate | None, plan: Plan | None, device: PlannedDevice
) -> DeviceCurve | None:
    """What is predicted for a device, with what it recomputes; None: nothing is."""
    curve = estimate.find(device) if estimate is not None else None
    layout = plan.layout if plan is not None else None
    names = layout.recomputed(device.id) if layout is not None else []
    if curve is None or estimate is None or not names:
        return curve
    if estimate.step is None:
        return None
    return RecomputingCurves(estimate.step).with_modules(curve, names)


def _compared(
    name: str, unit: str, median: float, low: float, high: float, seen: float | None
) -> dict[str, Any]:
    # The time of an emulated device is set, so it has no interval.
    has_interval = low < high and not is_unknown(low, high)
    return {
        "quantity": name,
        "unit": unit,
        "predicted": median,
        "low": low,
        "high": high,
        "measured": seen,
        "error": median / seen - 1 if seen else None,
        "inside": low <= seen <= high if seen is not None and has_interval else None,
    }
