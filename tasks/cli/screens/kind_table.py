"""What a device does in a step by kind of action, predicted beside measured, for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.tasks.cli.screens.console import table
from trainwright.tasks.cli.screens.quantities import SIZES, TIMES, Units, unit_of
from trainwright.tasks.runs.artefacts.step_kinds import StepByKind, mean_by_kind

_VERBS = {"compute_s": "computes", "wait_s": "waits", "sent_bytes": "sends"}


def show_kinds(predicted: Sequence[Any], measured: Sequence[Any] | None = None) -> None:
    """The table, if anything is known: each a list of `StepByKind`, or their JSON.

    Without `measured`, the table has no column for it.
    """
    columns = [predicted] if measured is None else [predicted, measured]
    means = [mean_by_kind([StepByKind.model_validate(one) for one in column]) for column in columns]
    if not any(means):
        return
    rows = []
    for field, verb in _VERBS.items():
        kinds = [
            kind
            for one, kind in (next(filter(None, means)))
            if one == field and any(mean.get((field, kind)) for mean in means)
        ]
        units = SIZES if field == "sent_bytes" else TIMES
        values = [
            [None if not mean else sum(mean[field, kind] for kind in kinds) for mean in means]
        ]
        values += [[mean.get((field, kind)) for mean in means] for kind in kinds]
        unit, texts = _in_one_unit(values, units)
        names = [f"{verb}, {unit}", *(f"  {kind}" for kind in kinds)]
        rows += [(name, *text) for name, text in zip(names, texts, strict=True)]
    table(
        "a device's step, mean",
        ("", "predicted", *(["measured"] if measured is not None else [])),
        rows,
        right=(1, 2),
    )


def _in_one_unit(
    values: list[list[float | None]], units: Units
) -> tuple[str, list[tuple[str, ...]]]:
    """The rows in the unit of their sum, the first row; each with three significant digits."""
    scale, unit = unit_of(values[0], units)
    return unit, [
        tuple("-" if one is None else f"{one / scale:.3g}" for one in row) for row in values
    ]
