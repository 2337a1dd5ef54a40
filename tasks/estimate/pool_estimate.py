"""Predicts the cost of a training step on every kind of device that the job may use."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Literal

from trainwright.estimator.curves import DeviceCurve, Mode
from trainwright.estimator.devices import HOST_MEMORY_TYPES
from trainwright.estimator.predict.calibration import Calibration, op_count
from trainwright.estimator.predict.communication import HOROVOD_CYCLE_S, Link
from trainwright.estimator.predict.correction import FinishedRun, learn
from trainwright.estimator.predict.loop_cost import in_training
from trainwright.estimator.predict.machine_speed import at_another_time
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.estimator.structure import Structure
from trainwright.infra.memory_limit import usable_memory_bytes
from trainwright.tasks import progress
from trainwright.tasks.estimate.calibrate import calibration_for
from trainwright.tasks.estimate.link import link_for_this_machine
from trainwright.tasks.estimate.passes import known_passes
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.pool import Device
from trainwright.tasks.spec.prices import Power

LONGEST_SMALL_OPERATION_S = 200e-6
"""Operations that take longer on average gain from each thread more."""
AS_FAST = 1.05
"""Within the noise of two calibrations."""
_VAGUEST: tuple[Mode, ...] = ("datasheet", "few-shot", "calibrated")


def estimate(
    structure: Structure,
    devices: Sequence[Device],
    calibrations: Sequence[Calibration] = (),
    *,
    settings: Settings,
    power: Mapping[str, Power] | None = None,
    backend: Literal["auto", "horovod", "torch"] = "auto",
    finished: Sequence[FinishedRun] = (),
    store: str | None = None,
) -> Estimate:
    """One curve for each kind of device.

    The calibration of a device kind (for a CPU: with its number of threads, or with a single thread
    if that is as fast) predicts it. Without one among `calibrations`, CPUs are measured, and GPUs
    are predicted by their datasheets. A curve
    describes a step of training: it includes the training loop's time if the calibration has it.

    CPUs of this machine are limited by its memory, the container's, and what the pool states. CPUs
    of other hosts are predicted as if they were this machine's; their memory is what the pool
    states, else unknown. Notices say so.

    If two or more devices are on this machine, the link between its ranks is measured; a curve then
    includes what a sum adds to the next step (`Link.after_sum_s`). `backend`
    is the job's library for collectives. `finished` runs correct the curves of their device
    types. `store` is the URI of the store with calibrations of other machines.
    """
    if far := sorted(
        {
            one.host
            for one in devices
            if one.type in HOST_MEMORY_TYPES and not one.local and one.host_memory_bytes is None
        }
    ):
        progress.emit(
            "notice",
            message=f"memory of {', '.join(far)}: unknown; plans assume that it is enough "
            "(state it as memory of the host in the pool file)",
        )
    if unlike := sorted({one.host for one in devices if one.type == "cpu" and not one.local}):
        progress.emit(
            "notice",
            message=f"CPUs of {', '.join(unlike)}: predicted as if they were this machine's",
        )
    kinds = {device.variant: device for device in devices}.values()
    given = {_measured_as(one.device_type, one.threads): one for one in calibrations}
    several = sum(device.local for device in devices) > 1
    local_link = link_for_this_machine(settings) if several else None
    curves, sources = list[DeviceCurve](), dict[str, str]()
    for device in kinds:
        choices = _calibrations(structure, device, given, settings, store)
        sources |= {
            _measured_as(one.device_type, one.threads): one.sha256()
            for one in choices
            if one is not None
        }
        curve = _fastest(
            structure,
            [_curve(structure, device, one, local_link, power or {}) for one in choices],
        )
        if device.type in HOST_MEMORY_TYPES:
            where = {"local": device.local, "host_memory_bytes": device.host_memory_bytes}
            curve = curve.model_copy(update={**where, "memory_limit_bytes": _memory(device)})
        curves.append(learn(curve, finished))
    horovod = backend != "torch" and importlib.util.find_spec("horovod") is not None
    modes = {curve.mode for curve in curves}
    return Estimate(
        mode=next((mode for mode in _VAGUEST if mode in modes), "calibrated"),
        curves=curves,
        layers=[one.facts() for one in structure.layer_work],
        units=structure.units,
        not_cut=structure.not_cut,
        builds_parts=structure.builds_parts,
        step=structure.recorded_step(),
        learned_from=max((curve.learned_from for curve in curves), default=0),
        # bf16 gradients are summed in fp32.
        gradient_bytes=structure.parameter_bytes * (2 if structure.precision == "bf16" else 1),
        calibrations=sources,
        local_link=local_link,
        passes=known_passes(settings),
        cycle_s=HOROVOD_CYCLE_S if horovod else 0.0,
    )


def _calibrations(
    structure: Structure,
    device: Device,
    given: Mapping[str, Calibration],
    settings: Settings,
    store: str | None,
) -> list[Calibration | None]:
    """The calibrations with which a device can compute: a CPU of several cores by thread count.

    A single thread is measured too if the operations are so small that it may be as fast. Nothing
    is measured for a device whose calibration is given.
    """
    name = _measured_as(device.type, device.threads)
    if device.type != "cpu" or name in given:
        alone = given.get(_measured_as("cpu", 1)) if device.type == "cpu" else None
        return [given.get(name), *([alone] if alone is not None and device.threads > 1 else [])]
    full = calibration_for(device.threads, settings, store)
    step_s = full.step_times_s(structure, [structure.batch_size])[0]
    if device.threads == 1 or step_s > LONGEST_SMALL_OPERATION_S * op_count(structure):
        return [full]
    return [full, calibration_for(1, settings, store, like=full)]


def _fastest(structure: Structure, curves: Sequence[DeviceCurve]) -> DeviceCurve:
    """The curve that is fastest at the traced batch size; of about equal ones, the last.

    That is the curve of a single thread, which needs no other thread to wake up in time.
    """
    times = [curve.median_s(structure.batch_size) for curve in curves]
    fast = [
        one for one, seconds in zip(curves, times, strict=True) if seconds <= AS_FAST * min(times)
    ]
    return fast[-1]


def _curve(
    structure: Structure,
    device: Device,
    calibration: Calibration | None,
    local_link: Link | None,
    power: Mapping[str, Power],
) -> DeviceCurve:
    """The cost of a step of training on a device, by a calibration or the datasheet."""
    override = power.get(device.type)
    curve = predict_curve(
        structure,
        calibration,
        device_type=device.type,
        cores=device.cores,
        speed=device.speed,
        power_w=(override.idle_w, override.load_w) if override else None,
    )
    if calibration is None:
        return curve
    if calibration.loop is not None:
        after_sum_s = local_link.after_sum_s if local_link is not None and device.local else 0.0
        curve = in_training(curve, structure, calibration.loop, after_sum_s)
    if device.type == "cpu":
        curve = curve.model_copy(update={"threads": calibration.threads})
    return at_another_time(curve, calibration.sentinel_drift)


def _memory(device: Device) -> float | None:
    """Memory of the host of a CPU: what is usable here, and what the pool states; None: unknown."""
    known = [float(usable_memory_bytes())] if device.local else []
    stated = device.host_memory_bytes
    return min([*known, *([stated] if stated is not None else [])], default=None)


def _measured_as(device_type: str, threads: int) -> str:
    """What a calibration measures: a device type; for a CPU, with its threads."""
    return f"cpu, {threads} thread(s)" if device_type == "cpu" else device_type
