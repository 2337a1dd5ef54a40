"""Batch sizes that a run found to fit on devices. Its estimate keeps them for the next plan."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.estimator.curves import DeviceCurve
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.pool import Variant


def note(run: Run, plan: Plan, most_batch_sizes: Mapping[str, int]) -> None:
    """Record the largest batch sizes that fit, by device id. Each applies to its whole kind."""
    seen: dict[Variant, int] = {}
    for device in plan.devices:
        if device.id in most_batch_sizes:
            most = most_batch_sizes[device.id] // plan.accumulation
            seen[device.variant] = min(most, seen.get(device.variant, most))
    run.write(_limited(run.read(Estimate), seen))


def carried_over(found: Estimate, before: Estimate | None) -> Estimate:
    """A new estimate of a run, with the limits recorded in the previous one."""
    curves = before.curves if before is not None else []
    return _limited(
        found,
        {_variant(one): one.most_batch_size for one in curves if one.most_batch_size is not None},
    )


def _limited(estimate: Estimate, seen: Mapping[Variant, int]) -> Estimate:
    curves = [
        curve.model_copy(update={"most_batch_size": seen[_variant(curve)]})
        if _variant(curve) in seen
        else curve
        for curve in estimate.curves
    ]
    return estimate.model_copy(update={"curves": curves})


def _variant(curve: DeviceCurve) -> Variant:
    return Variant(
        curve.device_type, curve.cores, curve.speed, curve.local, curve.host_memory_bytes
    )
