"""What became of a training: the Result, from what the ranks said and the rows they recorded. Loads no torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any, Literal

from trainwright.estimator.curves import Interval
from trainwright.estimator.energy import datasheet_power
from trainwright.estimator.quantiles import quantile
from trainwright.tasks.artefacts import (
    Checkpoint,
    DeviceResult,
    Measured,
    PlannedDevice,
    Result,
    SplitEvent,
    split_since,
)
from trainwright.tasks.job import Target
from trainwright.tasks.objects import ObjectStore
from trainwright.tasks.pool import load_pool
from trainwright.tasks.train import checkpoint
from trainwright.tasks.train.fence import folder_name
from trainwright.tasks.train.metrics import read_rows
from trainwright.tasks.train.request import Order

Message = dict[str, Any]


def result_of(
    order: Order, store: ObjectStore, done: dict[int, Message], shares: list[str], resumed_from_step: int | None
) -> Result:
    """The result of a training that has reached its end. Rows of earlier launches count, those of lost steps do not."""
    request, first = order.request, next(said for said in done.values() if "events" in said)
    plan, job = request.plan, request.job
    rows = [read_rows(store, f"steps-rank{rank}") for rank in range(len(plan.devices))]
    events = [SplitEvent.model_validate(event) for event in first["events"]]
    since = split_since(events, [device.batch_size for device in plan.devices])
    devices = [
        _device_result(rank, device, done[rank], rows[rank], first["split"][rank], since, shares[rank])
        for rank, device in enumerate(plan.devices)
    ]
    busy_s = [sum(row["compute_s"] for row in own) for own in rows]
    energy_j, cost = energy_and_cost(job.pool, plan.devices, busy_s, first["duration_s"])
    states = checkpoint.list_states(store)
    best = checkpoint.best_of(states)
    return Result(
        state="success",
        metrics=first["metrics"],
        target_reached=_reached(job.train.target, first["metrics"]),
        predicted=plan.predicted,
        measured=Measured(
            step_time_s=percentiles([row["step_time_s"] for row in _longest(rows)]),
            duration_s=first["duration_s"],
            peak_memory_bytes=max(device.peak_memory_bytes for device in devices),
            energy_j=energy_j,
            energy_source=energy_source(plan.devices),
            cost=cost,
        ),
        devices=devices,
        split_events=events,
        checkpoints=[
            Checkpoint(path=folder_name(state.step), step=state.step, metrics=state.metrics, best=state is best)
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


def _longest(rows: list[list[Message]]) -> list[Message]:
    """The rows of the rank that took part in the most steps."""
    return [row for row in max(rows, key=len) if row["step_time_s"] > 0]


def _device_result(
    rank: int, device: PlannedDevice, said: Message, rows: list[Message], batch_size: int, split_since: int, share: str
) -> DeviceResult:
    full = [row["compute_s"] for row in rows if row["step"] >= split_since and row["batch_size"] == batch_size > 0]
    return DeviceResult(
        id=device.id,
        type=device.type,
        rank=rank,
        batch_size=batch_size,
        samples=sum(row["batch_size"] for row in rows),
        step_time_s=percentiles(full),
        wait_s=sum(row["wait_s"] for row in rows),
        communication_s=sum(row.get("communication_s", 0.0) for row in rows),
        peak_memory_bytes=said["peak_memory_bytes"],
        cpu_s=said["cpu_s"],
        share=share,
    )


def percentiles(values: Sequence[float]) -> Interval | None:
    """Median, 5th and 95th percentile; None of nothing."""
    if not values:
        return None
    low, median, high = (quantile(values, share) for share in (0.05, 0.5, 0.95))
    return Interval(low=low, median=median, high=high)


def energy_and_cost(
    pool_file: str | None, devices: Sequence[PlannedDevice], busy_s: Sequence[float], duration_s: float
) -> tuple[float, float | None]:
    """Joule and money: measured times by power, load while busy, idle while not.

    Power is the plan's (the pool file's, else as measured, else the datasheet's); where it holds none, the pool file's or the
    datasheet's.
    """
    pool = load_pool(pool_file)
    energy_j = rent = 0.0
    for device, busy in zip(devices, busy_s, strict=True):
        power = device.power or pool.power.get(device.type) or datasheet_power(device.type, device.cores)
        energy_j += power.load_w * busy + power.idle_w * max(0.0, duration_s - busy)
        rent += pool.prices.get(device.type, 0.0) * duration_s / 3600
    return energy_j, rent + pool.prices.get("energy", 0.0) * energy_j / 3.6e6 if pool.prices else None


def energy_source(devices: Sequence[PlannedDevice]) -> Literal["measured", "datasheet"]:
    """`measured` where the power of every device was."""
    measured = all(device.power is not None and device.power.energy_source == "measured" for device in devices)
    return "measured" if measured else "datasheet"


def _reached(target: Target | None, metrics: dict[str, float]) -> bool | None:
    if target is None or target.metric not in metrics:
        return None
    value = metrics[target.metric]
    return value <= target.value if target.metric == "loss" else value >= target.value


def _versions(backend: str) -> dict[str, str]:
    names = ["trainwright", "torch", *(["horovod"] if backend == "horovod" else [])]
    return {name: importlib.metadata.version(name) for name in names}
