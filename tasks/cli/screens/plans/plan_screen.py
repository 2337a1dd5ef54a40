"""Shows plans to a person, in tables that fit 80 columns.

Every column, or row of one quantity, has one unit, which its header states.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.estimator.curves import Interval
from trainwright.tasks.allocate.layouts.words import SYNC_WORDS, layers_text
from trainwright.tasks.allocate.plan.device_counts import as_text
from trainwright.tasks.cli.screens.console import out, table
from trainwright.tasks.cli.screens.kind_table import show_kinds
from trainwright.tasks.cli.screens.plans.plan_sentence import micro, plan_sentence
from trainwright.tasks.cli.screens.plans.search_screen import show_searched
from trainwright.tasks.cli.screens.quantities import (
    ENERGIES,
    SIZES,
    TIMES,
    Units,
    column,
    headed,
    median_cell,
    money,
)
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL
from trainwright.tasks.runs.artefacts.plan import (
    Alternative,
    FrontPoint,
    HeldDevice,
    Plan,
    Prediction,
)
from trainwright.tasks.units import counted, size

ALTERNATIVES_SHOWN = 6
_LONG_ID = 26
_GROUPS_SHOWN = 12


def show_plan(plan: Plan, *, everything: bool) -> None:
    """A plan: in a sentence; its devices, what is predicted, its layout, and what is held now.

    With `everything`, also each device's part of a step, other choices, and what was searched.
    """
    out.print(plan_sentence(plan), style="bold", markup=False)
    out.print()
    _show_devices(plan)
    _show_predicted(plan)
    _show_layout(plan)
    show_held(plan.held)
    if not everything:
        out.print("more: the same command with --all, or --json", style="dim")
        return
    _show_steps(plan)
    show_kinds(plan.predicted.by_kind if plan.predicted is not None else [])
    _show_alternatives(plan)
    _show_batches(plan)
    if len(plan.front) > 1:
        _show_points(
            "time against energy and cost (* the plan)",
            [_values(one) for one in plan.front],
            [_mark(one) for one in plan.front],
            [
                f"{as_text(one.devices)}{_batch(one, plan)}{_laid_out(one, plan)}"
                for one in plan.front
            ],
            plan.currency,
        )
    show_searched(plan)


def _show_devices(plan: Plan) -> None:
    devices, times = plan.devices, [one.step_time_s for one in plan.devices]
    unit, texts = column(
        [value for one in times for value in (one.median, one.low, one.high)], TIMES
    )
    memory, sizes = headed("memory", [one.peak_memory_bytes for one in devices], SIZES)
    step = (f"own step\n{unit}", f"low\n{unit}", f"high\n{unit}")
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
        f"devices, global batch {plan.global_batch_size}{micro(plan.accumulation)}"
        f"{_of_stages(plan)}; step: median and 90 % interval",
        ("device", "batch", *step, memory, "predicted\nby"),
        rows,
        right=(1, 2, 3, 4, 5),
    )


def _show_layout(plan: Plan) -> None:
    """The layout in words, how each layer is treated, and the other layouts."""
    if plan.layout_in_words:
        why = f" ({plan.layout_rule})" if plan.layout_rule else ""
        out.print(f"layout: {plan.layout_in_words}{why}", markup=False)
        out.print()
    if plan.by_layer:
        table(
            "how the copies of each layer are kept equal, and what a device sends in a step",
            ("how", "sends", "layers", "why"),
            [
                (SYNC_WORDS[one.sync], size(one.sent_bytes), layers_text(one), one.why)
                for one in plan.by_layer[:_GROUPS_SHOWN]
            ],
            right=(1,),
        )
        if (more := len(plan.by_layer) - _GROUPS_SHOWN) > 0:
            out.print(f"{counted(more, 'more group')} of layers with --json")
            out.print()
    others = _other_layouts(plan)
    if others:
        _show_points(
            "other layouts, and why each was rejected",
            [medians(one.predicted) for one in others],
            ["" for _ in others],
            [f"{one.layout_in_words}; {one.reason}" for one in others],
            plan.currency,
            "layout",
        )


def _other_layouts(plan: Plan) -> list[Alternative]:
    return [one for one in plan.alternatives if one.layout_in_words and one.predicted is not None]


def _show_steps(plan: Plan) -> None:
    """What each device does in a step, its price and its host's window, if they are known."""
    devices = plan.devices
    shares = [one.step_shares for one in devices]
    columns: list[tuple[str, list[str]]] = []
    if None not in shares:
        columns += [
            (f"{verb}\n%", [f"{100 * getattr(one, field):.1f}" for one in shares])
            for verb, field in (
                ("computes", "compute"),
                ("waits", "wait"),
                ("communicates", "communicate"),
            )
        ]
    if any(one.price_per_hour is not None for one in devices):
        per_hour = [(1.0, f"{plan.currency or 'units'}/h")]
        columns.append(headed("price", [one.price_per_hour for one in devices], per_hour))
    if any(one.available for one in devices):
        columns.append(("available\nUTC", [one.available or "always" for one in devices]))
    if columns:
        rows = zip(
            map(_broken, (one.id for one in devices)), *(texts for _, texts in columns), strict=True
        )
        table(
            "each device's part of a step, and its price",
            ("device", *(name for name, _ in columns)),
            rows,
            right=range(1, len(columns) + 1),
        )


def _show_alternatives(plan: Plan) -> None:
    layouts = _other_layouts(plan)
    rest = [one for one in plan.alternatives if one not in layouts]
    others = [one for one in rest if one.predicted is not None][:ALTERNATIVES_SHOWN]
    if not others:
        return
    more = len(rest) - len(others)
    _show_points(
        "alternatives, and why each was rejected" + (f" ({more} more with --json)" if more else ""),
        [medians(one.predicted) for one in others],
        ["" for _ in others],
        [f"{as_text(one.devices)}{_batch(one, plan)}: {one.reason}" for one in others],
        plan.currency,
    )


def show_held(held: Sequence[HeldDevice] | None) -> None:
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
    currency, rows = money(plan.currency), []
    if predicted is not None:
        for name, value, units in (
            ("step time", predicted.step_time_s, TIMES),
            ("duration", predicted.duration_s, TIMES),
            ("energy", predicted.energy_j, ENERGIES),
            ("cost", predicted.cost, currency),
            ("  rent", predicted.rent, currency),
            ("  energy", predicted.energy_cost, currency),
        ):
            if value is not None or not name.startswith(" "):
                rows.append(_interval(name, value, limited.get(name), units))
    for name, limit, units in (
        ("deadline", plan.deadline_s, TIMES),
        ("budget", plan.budget, currency),
        ("hosts' windows", plan.window_s, TIMES),
    ):
        unit, (text,) = column([limit], units)
        if limit is not None or name == "deadline":
            rows.append((f"{name}, {unit}" if limit is not None else name, "", "", "", text))
    held = f"at most\n({100 * most.confidence:.4g} %)" if most is not None else "limit"
    table(
        f"predicted (90 % interval), least {plan.objective}",
        ("", "median", "low", "high", held),
        rows,
        right=(1, 2, 3, 4),
    )


def _interval(
    name: str, value: Interval | None, most: float | None, units: Units
) -> tuple[str, ...]:
    if value is None:
        return (name, "-", "-", "-", "")
    unit, texts = column([value.median, value.low, value.high, most], units, value.median)
    texts[0] = median_cell(value.model_dump(), units, texts[0])
    return (f"{name}, {unit}", *texts[:3], texts[3] if most is not None else "")


def _show_points(
    title: str,
    points: Sequence[tuple[float | None, float | None, float | None]],
    marks: Sequence[str],
    about: Sequence[str],
    currency: str | None,
    of: str = "devices",
) -> None:
    """A row for each point: duration, energy and cost, and what it is about."""
    columns = [
        headed(name, [point[place] for point in points], units)
        for place, (name, units) in enumerate(
            (("duration", TIMES), ("energy", ENERGIES), ("cost", money(currency)))
        )
    ]
    headers, figures = [header for header, _ in columns], [texts for _, texts in columns]
    if any(marks):
        headers, figures = [*headers, ""], [*figures, list(marks)]
    rows = list(zip(*figures, about, strict=True))
    table(title, (*headers, of), rows, right=(0, 1, 2))


def _show_batches(plan: Plan) -> None:
    """The best that was found for each global batch; not the best if the search ended early."""
    seen = plan.searched
    sizes = seen.global_batch_sizes if seen else [one.global_batch_size for one in plan.batches]
    if len(sizes) < 2 or not plan.batches:
        return
    found = {one.global_batch_size: one for one in plan.batches}
    nothing = (None, None, None)
    _show_points(
        "global batches, with the best devices that were found (* the plan)",
        [_values(found[size]) if size in found else nothing for size in sizes],
        [_mark(found[size]) if size in found else "" for size in sizes],
        [
            f"{size}{micro(found[size].accumulation)}: {as_text(found[size].devices)}"
            if size in found
            else f"{size}: not competitive, or misses a limit"
            for size in sizes
        ],
        plan.currency,
    )


def medians(predicted: Prediction | None) -> tuple[float, float | None, float | None]:
    assert predicted is not None
    energy, cost = predicted.energy_j, predicted.cost
    return (
        predicted.duration_s.median,
        energy.median if energy else None,
        cost.median if cost else None,
    )


def _values(point: FrontPoint) -> tuple[float, float | None, float | None]:
    return point.time, point.energy, point.cost


def _mark(point: FrontPoint) -> str:
    return "*" if point.chosen else "" if point.feasible else "misses a limit"


def _batch(one: Alternative | FrontPoint, plan: Plan) -> str:
    """Its batch, if it is not the plan's."""
    if (one.global_batch_size, one.accumulation) == (plan.global_batch_size, plan.accumulation):
        return ""
    return f", batch {one.global_batch_size}{micro(one.accumulation) or ' at once'}"


def _laid_out(one: FrontPoint, plan: Plan) -> str:
    """Its layout, if it is not the plan's."""
    chosen = plan.layout.name if plan.layout is not None else DATA_PARALLEL
    return f", {one.layout}" if one.layout != chosen else ""


def _of_stages(plan: Plan) -> str:
    staged = plan.layout is not None and plan.layout.has_stages
    return "; a stage computes all samples of its pipeline" if staged else ""


def _broken(name: str) -> str:
    """A device's id; a long one continues on a second line after its host."""
    return name if len(name) <= _LONG_ID else name.replace("/", "/\n  ", 1)
