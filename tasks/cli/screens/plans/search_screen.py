"""Shows which choices a plan was compared with, and how much better one of them can be."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.tasks.allocate.plan.device_counts import as_text
from trainwright.tasks.cli.screens.console import out, table
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL
from trainwright.tasks.runs.artefacts.plan import Plan, SearchedChoices
from trainwright.tasks.units import plain

_BETTER = {
    "time": ("takes less time", "be up to {} faster"),
    "energy": ("needs less energy", "need up to {} less energy"),
    "cost": ("costs less", "cost up to {} less"),
}


def show_searched(plan: Plan) -> None:
    """Which choices the plan was compared with, and how much better one of them can be."""
    if (seen := plan.searched) is not None:
        staged = plan.layout is not None and plan.layout.has_stages
        sets = "more than 10^15" if seen.device_sets is None else f"{seen.device_sets:,}"
        rows = [
            ("devices", f"{seen.devices:,}, in {sets} different sets"),
            ("global batches", _numbers(seen.global_batch_sizes)),
            *(_searched_stages(plan) if staged else _searched_splits(seen)),
            ("layouts", ", ".join(seen.layouts)),
        ]
        if seen.without_price:
            rows.append(("left out", f"{as_text(seen.without_price)}: the pool has no price"))
        title = "searched" if staged else "searched: every combination that keeps the limits"
        table(title, ("", ""), rows)
    batch = plan.global_batch_size
    none_is, another_could = _BETTER[plan.objective]
    name = plan.layout.name if plan.layout else DATA_PARALLEL
    kind = "data parallel plan" if name == DATA_PARALLEL else "plan of any layout"
    if plan.gap == 0:
        found = f"exact: at a global batch of {batch}, no other {kind} {none_is}"
    elif plan.gap == 1:
        found = f"at a global batch of {batch}, how much better another {kind} can be is not known"
    else:
        found = f"bounded: at a global batch of {batch}, another {kind} could "
        found += another_could.format(_per_cent(plan.gap))
    if name == DATA_PARALLEL and plan.layouts_gap is not None:
        found += f", and one of another layout {_any_layout(plan.layouts_gap, another_could)}"
    out.print(f"{found}; found in {plan.solve_time_s:.2f} s")
    if plan.batch_rule:
        out.print(f"global batch {batch}: {plan.batch_rule}", markup=False)
    out.print()


def _searched_splits(seen: SearchedChoices) -> list[tuple[str, str]]:
    pieces = seen.most_micro_batches
    most_micro_batches = f"up to {pieces}" if pieces > 1 else "1"
    return [
        ("micro-batches", f"{most_micro_batches}; more would be slower"),
        ("splits", "of the global batch among the devices, in whole samples"),
    ]


def _searched_stages(plan: Plan) -> list[tuple[str, str]]:
    assert plan.layout is not None
    layout, units = plan.layout, len(plan.units)
    return [
        ("micro-batches", f"{plan.accumulation}: the best of the numbers that were tried"),
        ("schedules", f"{layout.schedule}: the best of those that were tried"),
        ("stages", f"cut between the model's {units} units; devices in the order that is best"),
        ("pipelines", f"{len(layout.pipelines)}: the best of the numbers that were tried"),
    ]


def _any_layout(gap: float, another_could: str) -> str:
    return f"could {another_could.format(_per_cent(gap))}" if gap > 0 else "is no better either"


def _per_cent(gap: float) -> str:
    return f"{plain(100 * gap, 2)} %"


def _numbers(values: Sequence[int]) -> str:
    """Numbers in rising order; those that follow each other as a range."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
