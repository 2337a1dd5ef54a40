"""Shows plans to a person, in tables that fit 80 columns.

Every column, or row of one quantity, has one unit, which its header states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from trainwright.estimator.curves import Interval
from trainwright.tasks.allocate.plan.device_counts import as_text, device_counts
from trainwright.tasks.cli.screens.console import out, table
from trainwright.tasks.runs.artefacts import (
    Alternative,
    FrontPoint,
    HeldDevice,
    JointPlan,
    Plan,
    Prediction,
)

_ALTERNATIVES_SHOWN = 6
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_ENERGIES = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"))
_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_MONEY = ((1.0, "currency"),)
_LONG_ID = 26
Units = Sequence[tuple[float, str]]


def column(values: Iterable[float | None], units: Units) -> tuple[str, list[str]]:
    """A unit for these values, and all of them in it, with the same number of decimals.

    The median is at least one of the unit. The least value has three significant digits, unless
    that takes more than six decimals.
    """
    given = list(values)
    known = sorted(abs(value) for value in given if value is not None and 0 < abs(value) < math.inf)
    if not known:
        return units[-1][1], ["-" if value is None else f"{value:g}" for value in given]
    scale, unit = next((one for one in units if known[len(known) // 2] >= one[0]), units[-1])
    decimals = min(6, max(0, 2 - math.floor(math.log10(known[0] / scale))))
    return unit, ["-" if value is None else f"{value / scale:.{decimals}f}" for value in given]


def _figures(name: str, values: Iterable[float | None], units: Units) -> tuple[str, list[str]]:
    """A column with its header."""
    unit, texts = column(values, units)
    return f"{name}\n{unit}", texts


def show_plan(plan: Plan) -> None:
    """A plan: its devices, its predicted duration, energy and cost, and the alternatives."""
    _show_devices(plan)
    _show_held(plan.held)
    _show_predicted(plan)
    _show_alternatives(plan)
    if len(plan.front) > 1:
        _show_points(
            "time against energy and cost (* the plan)",
            [(one.time, one.energy, one.cost) for one in plan.front],
            [_mark(one) for one in plan.front],
            [f"{as_text(one.devices)}{_batch(one, plan)}" for one in plan.front],
        )
    found = "no plan is better"
    if plan.search != "exact":
        found += f" by more than {100 * plan.gap:.2g} %"
    out.print("search", style="bold")
    out.print(f"  {found}; found in {plan.solve_time_s:.2f} s")
    if plan.batch_rule:
        out.print(f"  global batch: {plan.batch_rule}", markup=False)
    out.print()


def _show_devices(plan: Plan) -> None:
    devices, times = plan.devices, [one.step_time_s for one in plan.devices]
    unit, texts = column(
        [value for one in times for value in (one.median, one.low, one.high)], _TIMES
    )
    memory, sizes = _figures("memory", [one.peak_memory_bytes for one in devices], _SIZES)
    step = (f"own step\n{unit}", f"5 %\n{unit}", f"95 %\n{unit}")
    rows = [
        (
            _broken(one.id),
            str(one.batch_size),
            *texts[3 * place : 3 * place + 3],
            sizes[place],
            one.mode or "-",
        )
        for place, one in enumerate(devices)
    ]
    table(
        f"devices, global batch {plan.global_batch_size}{_micro(plan.accumulation)}",
        ("device", "batch", *step, memory, "predicted\nby"),
        rows,
        right=(1, 2, 3, 4, 5),
    )


def _show_alternatives(plan: Plan) -> None:
    others = [one for one in plan.alternatives if one.predicted is not None][:_ALTERNATIVES_SHOWN]
    if not others:
        return
    more = len(plan.alternatives) - len(others)
    _show_points(
        "alternatives: devices and why not" + (f" ({more} more with --json)" if more else ""),
        [_medians(one.predicted) for one in others],
        ["" for _ in others],
        [f"{as_text(one.devices)}{_batch(one, plan)}: {one.reason}" for one in others],
    )


def show_joint(joint: JointPlan) -> None:
    """The joint plan of several jobs: when each runs, on which devices."""
    jobs = joint.jobs
    unit, texts = column(
        [value for one in jobs for value in (one.starts_s, one.ends_s, one.deadline_s)], _TIMES
    )
    energy, energies = _figures("energy", [_medians(one.predicted)[1] for one in jobs], _ENERGIES)
    together, (total,) = column([joint.energy_j], _ENERGIES)
    less = ""
    if joint.search != "exact" and joint.gap is not None:
        less = f": at most {100 * joint.gap:.2g} % less is possible"
    rows = [
        (
            str(one.global_batch_size),
            *texts[3 * place : 3 * place + 3],
            energies[place],
            "SLIPS" if one.slips else "",
            f"{one.job}: {as_text(device_counts(one.devices))}",
        )
        for place, one in enumerate(jobs)
    ]
    times = (f"starts\n{unit}", f"ends by\n{unit}", f"deadline\n{unit}")
    table(
        f"{len(jobs)} jobs, {total} {together} together ({joint.search}{less})",
        ("batch", *times, energy, "", "job: devices"),
        rows,
        right=(0, 1, 2, 3, 4),
    )
    _show_held(joint.held)


def _show_held(held: Sequence[HeldDevice] | None) -> None:
    if not held:
        return
    rows = [
        (_broken(one.id), f"{one.until[11:19]} UTC", f"{one.holder}, for {one.run}") for one in held
    ]
    table("held now", ("device", "until, unless\nrenewed", "by"), rows)
    out.print(
        "This plan uses the whole pool, as if these were free too. A run plans with the devices "
        "that are free when its turn in the queue comes; if they are not enough, it waits, for "
        "queue_timeout at most."
    )
    out.print()


def _show_predicted(plan: Plan) -> None:
    """What is predicted; each limit is in the column of the value it is compared with."""
    predicted, most = plan.predicted, plan.not_exceeded
    limited = {} if most is None else {"duration": most.duration_s, "cost": most.cost}
    rows = []
    if predicted is not None:
        for name, value, units in (
            ("step time", predicted.step_time_s, _TIMES),
            ("duration", predicted.duration_s, _TIMES),
            ("energy", predicted.energy_j, _ENERGIES),
            ("cost", predicted.cost, _MONEY),
        ):
            rows.append(_interval(name, value, limited.get(name), units))
    for name, limit, units in (
        ("deadline", plan.deadline_s, _TIMES),
        ("budget", plan.budget, _MONEY),
    ):
        unit, (text,) = column([limit], units)
        if limit is not None or name == "deadline":
            rows.append((f"{name}, {unit}" if limit is not None else name, "", "", "", text))
    held = f"at most,\n{100 * most.confidence:.4g} % sure" if most is not None else "limit"
    table(
        f"predicted, least {plan.objective}",
        ("", "median", "5 %", "95 %", held),
        rows,
        right=(1, 2, 3, 4),
    )


def _interval(
    name: str, value: Interval | None, most: float | None, units: Units
) -> tuple[str, ...]:
    if value is None:
        return (name, "-", "-", "-", "")
    unit, texts = column([value.median, value.low, value.high, most], units)
    return (f"{name}, {unit}", *texts[:3], texts[3] if most is not None else "")


def _show_points(
    title: str,
    points: Sequence[tuple[float, float | None, float | None]],
    marks: Sequence[str],
    about: Sequence[str],
) -> None:
    """A row for each point: duration, energy and cost, and what it is about."""
    columns = [
        _figures(name, [point[place] for point in points], units)
        for place, (name, units) in enumerate(
            (("duration", _TIMES), ("energy", _ENERGIES), ("cost", _MONEY))
        )
    ]
    headers, figures = [header for header, _ in columns], [texts for _, texts in columns]
    if any(marks):
        headers, figures = [*headers, ""], [*figures, list(marks)]
    rows = list(zip(*figures, about, strict=True))
    table(title, (*headers, "devices"), rows, right=(0, 1, 2))


def _medians(predicted: Prediction | None) -> tuple[float, float | None, float | None]:
    assert predicted is not None
    energy, cost = predicted.energy_j, predicted.cost
    return (
        predicted.duration_s.median,
        energy.median if energy else None,
        cost.median if cost else None,
    )


def _mark(point: FrontPoint) -> str:
    return "*" if point.chosen else "" if point.feasible else "misses a limit"


def _batch(one: Alternative | FrontPoint, plan: Plan) -> str:
    """Its batch, if it is not the plan's."""
    if (one.global_batch_size, one.accumulation) == (plan.global_batch_size, plan.accumulation):
        return ""
    return f", batch {one.global_batch_size}{_micro(one.accumulation) or ' at once'}"


def _micro(accumulation: int) -> str:
    return f" in {accumulation} micro-batches" if accumulation > 1 else ""


def _broken(name: str) -> str:
    """A device's id; a long one continues on a second line after its host."""
    return name if len(name) <= _LONG_ID else name.replace("/", "/\n  ", 1)
