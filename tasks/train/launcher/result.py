"""Makes the Result of a training from the ranks' reports and recorded rows.

Loads no torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any, Literal

from trainwright.estimator.curves import Interval
from trainwright.estimator.predict.energy import datasheet_power
from trainwright.estimator.quantiles import quantile
from trainwright.tasks import progress
from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.runs.artefacts.step_kinds import StepByKind
from trainwright.tasks.runs.artefacts.training_result import (
    Checkpoint,
    ClassMetrics,
    Confusion,
    DeviceResult,
    Measured,
    Result,
    SplitEvent,
    split_since,
)
from trainwright.tasks.spec.metric_names import better_is
from trainwright.tasks.spec.pool import Device, load_pool
from trainwright.tasks.spec.train_spec import Target
from trainwright.tasks.storage.objects import ObjectStore
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.checkpoint.fence import folder_name
from trainwright.tasks.train.record.metrics import read_steps
from trainwright.tasks.train.request import Order

Message = dict[str, Any]


def result_of(
    order: Order,
    store: ObjectStore,
    reports: dict[int, Message],
    shares: list[str],
    resumed_from_step: int | None,
) -> Result:
    """The result of a finished training.

    Counts the rows of earlier launches, but not those of lost steps.
    """
    request, first = order.request, next(one for one in reports.values() if "events" in one)
    plan, job = request.plan, request.job
    by_device = _rows_by_device(store, plan.devices)
    rows = [by_device.pop(device.id, []) for device in plan.devices]
    events = [SplitEvent.model_validate(event) for event in first["events"]]
    since = split_since(events, plan.shares)
    devices = [
        _device_result(
            rank, device, reports[rank], rows[rank], first["split"][rank], since, shares[rank]
        )
        for rank, device in enumerate(plan.devices)
    ]
    # devices of an earlier plan of this run
    others = [device for device in load_pool(job.pool).devices() if device.id in by_device]
    if gone := sorted(by_device.keys() - {device.id for device in others}):
        progress.emit(
            "notice",
            message=f"energy and cost exclude {', '.join(gone)}: no longer in the pool",
        )
    used: list[tuple[Device, list[Message]]] = list(zip(plan.devices, rows, strict=True))
    used += [(device, by_device[device.id]) for device in others]
    energy_j, cost = energy_and_cost(
        job.pool,
        [device for device, _ in used],
        [sum(row["compute_s"] for row in own) for _, own in used],
        [
            first["duration_s"] * _part(own, first["step"], to_the_end=device not in others)
            for device, own in used
        ],
    )
    states = files.list_states(store)
    best, kept = files.best_of(states), files.stored_of(states, job.train.checkpoint)
    metrics: dict[str, float] = kept.metrics if kept is not None else first["metrics"]
    by_class = kept.by_class if kept is not None else first["by_class"]
    return Result(
        state="success",
        metrics=metrics,
        model_step=kept.step if kept is not None else None,
        by_class=_by_class(by_class, request.schema_.classes),
        target_reached=_reached(job.train.target, metrics),
        early_stopped=first["early_stopped"],
        predicted=plan.predicted,
        measured=Measured(
            step_time_s=percentiles([row["step_time_s"] for row in _longest(rows)]),
            duration_s=first["duration_s"],
            peak_memory_bytes=max(device.peak_memory_bytes for device in devices),
            energy_j=energy_j,
            energy_source=energy_source([*plan.devices, *others]),
            cost=cost,
            by_kind=[
                StepByKind(device=device.id, **found)
                for rank, device in enumerate(plan.devices)
                if (found := reports[rank].get("by_kind")) is not None
            ],
        ),
        devices=devices,
        split_events=events,
        checkpoints=[
            Checkpoint(
                path=folder_name(state.step),
                step=state.step,
                metrics=state.metrics,
                best=state is best,
            )
            for state in states
        ],
        learning_rate=request.learning_rate,
        global_batch_size=plan.global_batch_size,
        steps=first["step"],
        epochs=job.train.epochs,
        noise_scale=first["noise_scale"],
        resumed_from_step=resumed_from_step,
        backend=order.backend,
        versions=_versions(order.backend),
    )


def _rows_by_device(store: ObjectStore, devices: Sequence[Device]) -> dict[str, list[Message]]:
    """Each device's rows, by step.

    Rows written by old versions name no device: they belong to the device of their rank.
    """
    found: dict[str, list[Message]] = {}
    for rank, rows in read_steps(store).items():
        for row in rows:
            name = row.get("device") or (devices[rank].id if rank < len(devices) else None)
            if name is not None:
                found.setdefault(name, []).append(row)
    return {name: sorted(rows, key=lambda row: int(row["step"])) for name, rows in found.items()}


def _part(rows: Sequence[Message], steps: int, *, to_the_end: bool) -> float:
    """The share of the training's steps from a device's first step to its last, or to the end."""
    if not rows or not steps:
        return 1.0
    last = steps - 1 if to_the_end else rows[-1]["step"]
    return float(min(1.0, max(0.0, (last - rows[0]["step"] + 1) / steps)))


def _longest(rows: list[list[Message]]) -> list[Message]:
    """The rows of the rank that took part in the most steps."""
    return [row for row in max(rows, key=len) if row["step_time_s"] > 0]


def _device_result(
    rank: int,
    device: PlannedDevice,
    report: Message,
    rows: list[Message],
    batch_size: int,
    split_since: int,
    share: str,
) -> DeviceResult:
    full = [
        row["compute_s"]
        for row in rows
        if row["step"] >= split_since and row["batch_size"] == batch_size > 0
    ]
    return DeviceResult(
        id=device.id,
        type=device.type,
        rank=rank,
        batch_size=batch_size,
        samples=sum(row["batch_size"] for row in rows),
        step_time_s=percentiles(full),
        wait_s=sum(row["wait_s"] for row in rows),
        communication_s=sum(row.get("communication_s", 0.0) for row in rows),
        peak_memory_bytes=report["peak_memory_bytes"],
        cpu_s=report["cpu_s"],
        share=share,
        image=report["image"],
    )


def percentiles(values: Sequence[float]) -> Interval | None:
    """Median, 5th and 95th percentile; None if there are no values."""
    if not values:
        return None
    low, median, high = (quantile(values, share) for share in (0.05, 0.5, 0.95))
    return Interval(low=low, median=median, high=high)


def energy_and_cost(
    pool_file: str | None,
    devices: Sequence[Device],
    busy_s: Sequence[float],
    held_s: Sequence[float],
) -> tuple[float, float | None]:
    """Energy in joules and cost, from measured times, power and prices.

    E = Σ_d (P_load,d · busy_d + P_idle,d · (held_d − busy_d)); the cost adds rent for the held
    time and the price of the energy. A device's power is the plan's; if the plan has none, the pool
    file's, else the datasheet's.
    """
    pool = load_pool(pool_file)
    energy_j = rent = 0.0
    for device, busy, held in zip(devices, busy_s, held_s, strict=True):
        planned = device.power if isinstance(device, PlannedDevice) else None
        power = planned or pool.power.get(device.type) or datasheet_power(device.type, device.cores)
        energy_j += power.load_w * busy + power.idle_w * max(0.0, held - busy)
        rent += pool.prices.get(device.type, 0.0) * held / 3600
    return energy_j, rent + pool.prices.get(
        "energy", 0.0
    ) * energy_j / 3.6e6 if pool.prices else None


def energy_source(devices: Sequence[Device]) -> Literal["measured", "datasheet"]:
    """`measured` if the power of every device was measured."""
    powers = [device.power if isinstance(device, PlannedDevice) else None for device in devices]
    measured = all(power is not None and power.energy_source == "measured" for power in powers)
    return "measured" if measured else "datasheet"


def _reached(target: Target | None, metrics: dict[str, float]) -> bool | None:
    if target is None or target.metric not in metrics:
        return None
    value = metrics[target.metric]
    less = better_is(target.metric) == "less"
    return value <= target.value if less else value >= target.value


def _by_class(found: dict[str, Any], names: list[str] | None) -> ClassMetrics | None:
    if not found:
        return None
    names = names or []
    confused = [
        Confusion(actual=names[own], predicted=names[other], rows=rows)
        for own, other, rows in found.get("confused", [])
    ]
    return ClassMetrics(names=names, **{**found, "confused": confused})


def _versions(backend: str) -> dict[str, str]:
    """Versions of what trains; a trainwright that is not installed has none."""
    names = ["trainwright", "torch", *(["horovod"] if backend == "horovod" else [])]
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
