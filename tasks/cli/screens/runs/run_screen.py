"""A run for a person: a summary that fits a screen, or everything that is known.

The summary fits 80 columns and 40 lines: the result in one bold sentence, what it took beside what
was predicted, the devices, and where the rest is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.text import Text

from trainwright.tasks.cli.screens.console import KEPT, facts, out, state, table
from trainwright.tasks.cli.screens.kind_table import show_kinds
from trainwright.tasks.cli.screens.quantities import (
    ENERGIES,
    TIMES,
    Units,
    column,
    median_cell,
    money,
)
from trainwright.tasks.runs.artefacts.export_report import EXPORT_FOLDER
from trainwright.tasks.spec.metric_names import leading_metric, shown_metrics
from trainwright.tasks.units import amount, counted, is_unknown, metric, seconds, size

_DEVICES_SHOWN = 8
_STEPS_SHOWN = 3
_STATE_STYLES = {
    "success": "green",
    "trained, not stored": "green",
    "failed": "red",
    "damaged": "red",
    "infeasible": "yellow",
    "interrupted": "yellow",
}


def show_run(document: dict[str, Any], command: str, *, everything: bool = False) -> None:
    """Print a run's summary, or everything in it. `command` shows this run."""
    lines = _result_lines(document, everything)
    lines += _recipe_lines(document, everything)
    lines += _place_lines(document, command)
    if not everything and document["measured"] is not None:
        lines.append(("more", f"{command} --all".replace(" ", KEPT)))
    at = dict(lines)["state"]
    styles = {"state": _STATE_STYLES.get(at, ""), "error": "red", "target": _target_style(document)}
    out.print()
    facts(_headline(document), lines, styles)
    _show_predicted(document)
    _show_devices(document["devices"], everything)
    if everything:
        _show_steps(document["steps"])
        if (measured := document["measured"]) is not None:
            show_kinds((document["predicted"] or {}).get("by_kind", []), measured["by_kind"])


def _headline(document: dict[str, Any]) -> str:
    """`digits: accuracy 0.9916; 2 CPUs, 20.6 s, 152 J`."""
    metrics, measured = document["metrics"], document["measured"]
    target = document["target"]
    name = leading_metric(metrics, target["metric"] if target else None)
    if measured is None or name is None:
        return str(document["job"])
    kinds = Counter(one["type"] for one in document["devices"])
    took = [
        counted(count, "CPU") if kind == "cpu" else f"{count} x {kind}"
        for kind, count in kinds.items()
    ]
    took.append(seconds(measured["duration_s"]))
    if measured["energy_j"] is not None:
        took.append(amount(measured["energy_j"], "J"))
    return f"{document['job']}: {name.replace('_', ' ')} {metric(metrics[name])}; {', '.join(took)}"


def _result_lines(document: dict[str, Any], everything: bool) -> list[tuple[str, str]]:
    trained = document["measured"] is not None
    stored = document["manifest"] is not None if trained else None
    lines = [("state", state(document["state"], stored))]
    if document.get("error"):
        lines.append(("error", f"{document['error']['kind']}: {document['error']['message']}"))
    if metrics := document["metrics"]:
        named = [f"{name} {metric(value)}" for name, value in shown_metrics(metrics).items()]
        whose = f" (model of {document['model_of']})" if document["model_of"] else ""
        lines.append(("metrics", _listed(named) + whose))
    if target := document["target"]:
        reached = {True: "reached", False: "not reached", None: "not known yet"}
        words = reached[document["target_reached"]]
        lines.append(("target", f"{target['metric']} {target['value']:g}: {words}"))
    lines += [
        ("baseline", one["words"]) for one in document["verdicts"] if one["kind"] == "baseline"
    ]
    if (early := document["early_stopped"]) is not None:
        lines.append(("early stopping", early["reason"]))
    if steps := document["steps"]:
        longest = sorted(steps, key=lambda name: -steps[name])[:_STEPS_SHOWN]
        parts = _listed(f"{name} {seconds(steps[name])}" for name in longest)
        lines.append(("took", f"{seconds(sum(steps.values()))}; longest: {parts}"))
    return lines


def _listed(items: Iterable[str]) -> str:
    """Items that no line ends in."""
    return ", ".join(one.replace(" ", KEPT) for one in items)


def _target_style(document: dict[str, Any]) -> str:
    return {True: "green", False: "yellow"}.get(document["target_reached"], "")


def _recipe_lines(document: dict[str, Any], everything: bool) -> list[tuple[str, str]]:
    """Model, learning rate, batch and layout; with `everything`, why each was chosen."""
    lines = []
    if model := document["recommended"]:
        recipe = ", ".join(
            f"{name.removeprefix('train.')} {value}" for name, value in model["recipe"].items()
        )
        lines.append(("recommended model", f"{model['name']}: {model['why']}"))
        if everything:
            lines.append(("its recipe", recipe))
    if document["learning_rate"] is not None:
        lines.append(("learning rate", f"{document['learning_rate']:.3g}"))
        if everything:
            lines.append(("reason", document["learning_rate_reason"]))
            if document["learning_rate_plot"] is not None:
                lines.append(("plot of the search", document["learning_rate_plot"]))
    if document["global_batch_size"] is not None:
        lines.append(("global batch", str(document["global_batch_size"])))
    if layout := document["layout"]:
        why = f" ({layout['rule']})" if layout["rule"] and everything else ""
        lines.append(("layout", f"{layout['words'] or layout['name']}{why}"))
        if everything:
            lines += [
                ("not chosen", f"{other['words']}; {other['reason']}") for other in layout["others"]
            ]
    if document["learned_from"] and everything:
        words = f"calibration and {counted(document['learned_from'], 'earlier run')}"
        lines.append(("predicted from", words))
    return lines


def _place_lines(document: dict[str, Any], command: str) -> list[tuple[str, str]]:
    """Where the run, its report, its exports and its newest checkpoint are."""
    lines = []
    if document["measured"] is None and document["checkpoints"]:
        newest = f"of step {document['trained_steps']}: {document['checkpoints'][-1]}"
        lines.append(("newest checkpoint", newest))
    lines.append(("run", document["run"]))
    if document["report"]:
        lines.append(("report", f"{command} --report report.html".replace(" ", KEPT)))
    for one in document["exports"]:
        value = one["metrics"]["exported"]
        where = f"{document['run']}/{EXPORT_FOLDER}{one['kind']}"
        lines.append((f"exported as {one['kind']}", f"{one['metric']} {metric(value)}, {where}"))
    return lines


def _show_predicted(document: dict[str, Any]) -> None:
    """Predicted and measured, each quantity in one unit, which its name states."""
    predicted, measured = document["predicted"], document["measured"] or {}
    if not predicted:
        return
    early = document["early_stopped"]
    rows = []
    for name, field, units in (
        ("step time", "step_time_s", TIMES),
        ("duration", "duration_s", TIMES),
        ("energy", "energy_j", ENERGIES),
        ("cost", "cost", money(document["currency"])),
    ):
        value, ends = measured.get(field), predicted.get(field)
        if isinstance(value, dict):
            value = value["median"]
        if ends is None and value is None:
            continue
        rows.append(_row(name, ends, value, units, early is None or field == "step_time_s"))
    by_datasheet = measured.get("energy_source") == "datasheet"
    table(
        "predicted (90 % interval) and measured"
        + ("; energy by datasheet" if by_datasheet else ""),
        ("", "median", "low", "high", "measured", ""),
        rows,
        right=(1, 2, 3, 4),
    )


def _row(
    name: str, ends: dict[str, float] | None, value: float | None, units: Units, comparable: bool
) -> tuple[str | Text, ...]:
    """`comparable`: an early stopped training is not what was predicted, but for its steps."""
    if ends is None or is_unknown(ends["low"], ends["high"]):
        unit, (measured,) = column([value], units)
        return (f"{name}, {unit}", "-" if ends is None else "not known", "-", "-", measured, "")
    given = [ends["median"], ends["low"], ends["high"]]
    unit, texts = column([*given, value], units, ends["median"])
    inside = Text()
    # The time of an emulated device is set, so it has no interval.
    if comparable and value is not None and ends["low"] < ends["high"]:
        within = ends["low"] <= value <= ends["high"]
        inside = Text("inside", "green") if within else Text("outside", "yellow")
    texts[0] = median_cell(ends, units, texts[0])
    return (f"{name}, {unit}", *texts, inside)


def _show_devices(devices: list[dict[str, Any]], everything: bool) -> None:
    if not devices:
        return
    shown = devices if everything else devices[:_DEVICES_SHOWN]
    used = [
        (
            device["id"],
            str(device["batch_size"]),
            seconds((device["step_time_s"] or {}).get("median")),
            seconds(device["wait_s"]),
            size(device["peak_memory_bytes"]),
            f"{device['samples']:,}",
            device["share"],
        )
        for device in shown
    ]
    more = len(devices) - len(shown)
    columns = ("device", "batch", "own step", "waited", "memory", "samples", "share by")
    table(
        "devices" + (f" ({more} more with --all)" if more else ""),
        columns,
        used,
        right=(1, 2, 3, 4, 5),
    )


def _show_steps(steps: dict[str, float]) -> None:
    if steps:
        took = [(name, seconds(value)) for name, value in steps.items()]
        took.append(("total", seconds(sum(steps.values()))))
        table("steps", ("step", "duration"), took, right=(1,))
