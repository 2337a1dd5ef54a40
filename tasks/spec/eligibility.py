"""Which devices of a pool a job may use, and checks that need no prediction.

These checks run before anything is traced or measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool
from trainwright.tasks.units import plain

_SHOWN = 200  # characters of a list of names


def usable(pool: Pool, job: Job) -> list[Device]:
    """The devices that the job may use; with an objective of cost, those that have a price.

    Raises BadInput for unknown names, for too few devices, or if too few have a price.
    """
    allowed, count = _allowed(pool, job), job.devices.min_count
    if len(allowed) < count:
        raise BadInput(
            f"devices.min_count: got {count}; "
            f"pool {pool.name} has {len(allowed)} device(s) that the job may use"
        )
    lacking = _types_without_price(pool, job)
    left = [device for device in allowed if device.type not in lacking]
    if len(left) < count:
        lacking &= {device.type for device in allowed}
        needed = f" of {count} devices (devices.min_count)" if left else ""
        raise BadInput(
            f"objective.{asks_for_cost(job)}; the cost{needed} is not known: "
            f"pool {pool.name} has no price for {_some(sorted(lacking))} (0/h if it is free)"
        )
    return left


def without_price(pool: Pool, job: Job) -> list[Device]:
    """Devices that the job could use if the pool had their price; none unless cost matters."""
    lacking = _types_without_price(pool, job)
    return [one for one in _allowed(pool, job) if one.type in lacking] if lacking else []


def _types_without_price(pool: Pool, job: Job) -> set[str]:
    """The pool's types without a price, if the job asks for the cost.

    In a pool that prices only energy, all devices are free.
    """
    rented = any(name != "energy" for name in pool.prices)
    if not rented or asks_for_cost(job) is None:
        return set()
    return {entry.type for host in pool.hosts for entry in host.devices} - set(pool.prices)


def _allowed(pool: Pool, job: Job) -> list[Device]:
    """The devices within the job's restrictions. Raises BadInput for unknown names."""
    chosen, devices = job.devices, pool.devices()
    known = {
        "types": {device.type for device in devices},
        "hosts": {device.host for device in devices},
        "ids": {device.id for device in devices},
    }
    for field, names in (("types", chosen.types), ("hosts", chosen.hosts), ("ids", chosen.ids)):
        for name in names:
            if name not in known[field]:
                raise BadInput(
                    f"devices.{field}: got {name[:_SHOWN]!r}; "
                    f"pool {pool.name} has {_some(sorted(known[field]))}"
                )
    for name in chosen.exclude:
        if not any(name in names for names in known.values()):
            raise BadInput(
                f"devices.exclude: got {name[:_SHOWN]!r}; "
                f"pool {pool.name} has no such type, host or id"
            )
    fields = ("types", "hosts", "ids", "exclude")
    restrictions = {
        field: set(getattr(chosen, field)) for field in fields if getattr(chosen, field)
    }
    left = _left(devices, restrictions)
    if not left:
        raise BadInput(_what_leaves_none(pool.name, devices, restrictions))
    return left


MOST_BATCH = 2**20
"""Samples in a step: bounds the planner's work; far above any batch used in practice."""


def require_possible(job: Job, pool: Pool, rows: int | None = None) -> None:
    """Raise BadInput for a batch that rows or devices rule out, or a cost without any price."""
    train, count = job.train, job.devices.min_count
    size = train.global_batch_size
    for field, given in (("global_batch_size", size), ("batch_bounds", train.batch_bounds[1])):
        if given != "auto" and given > MOST_BATCH:
            raise BadInput(f"train.{field}: got {given}; allowed: at most {MOST_BATCH}")
    if size != "auto" and rows is not None and size > rows:
        raise BadInput(
            f"train.global_batch_size: got {size}; allowed: at most the {rows} training rows"
        )
    most = [
        (train.batch_bounds[1], "upper end of train.batch_bounds")
        if size == "auto"
        else (size, "global batch")
    ]
    if rows is not None:
        most.append((rows, "number of training rows"))
    least, name = min(most)
    if count > least:
        raise BadInput(
            f"devices.min_count: got {count}; "
            f"allowed: at most {least}, the {name} (one sample for each device)"
        )
    if (asked := asks_for_cost(job)) is not None and not pool.prices:
        raise BadInput(
            f"objective.{asked}; the cost is not known: pool {pool.name} has no prices; set "
            "`prices` in a pool file, such as {cpu: 0.04/h}"
        )


def asks_for_cost(job: Job) -> str | None:
    """The field of the objective that requires the cost, with its value; None if there is none."""
    if job.objective.minimize == "cost":
        return "minimize: got 'cost'"
    budget = job.objective.budget
    return None if budget is None else f"budget: got {plain(budget, 6)}"


def _left(devices: Sequence[Device], restrictions: Mapping[str, set[str]]) -> list[Device]:
    """The devices that meet all restrictions."""

    def allowed(device: Device, field: str, names: set[str]) -> bool:
        if field == "exclude":
            return not names & {device.type, device.host, device.id}
        return {"types": device.type, "hosts": device.host, "ids": device.id}[field] in names

    return [
        one
        for one in devices
        if all(allowed(one, field, names) for field, names in restrictions.items())
    ]


def _what_leaves_none(
    pool: str, devices: Sequence[Device], restrictions: Mapping[str, set[str]]
) -> str:
    """The smallest set of restrictions that leaves no device, in one line."""
    blamed = next(
        fields
        for count in range(1, len(restrictions) + 1)
        for fields in itertools.combinations(restrictions, count)
        if not _left(devices, {field: restrictions[field] for field in fields})
    )
    if len(blamed) == 1:
        named, got = f"devices.{blamed[0]}", _some(sorted(restrictions[blamed[0]]))
    else:
        named = "devices"
        got = ", ".join(f"{field} [{_some(sorted(restrictions[field]))}]" for field in blamed)
    return (
        f"{named}: got {got}; with this restriction the job may use "
        f"0 of the {len(devices)} device(s) of pool {pool}"
    )


def _some(names: Sequence[str]) -> str:
    text = ", ".join(names)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
