"""Prints for a person: progress on stderr, tables on stdout, aligned figures with units."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.box import Box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from trainwright.tasks import progress
from trainwright.tasks.cli.screens.quantities import money
from trainwright.tasks.runs.artefacts.export_report import EXPORT_FOLDER
from trainwright.tasks.units import amount, interval, plain, seconds, size

if TYPE_CHECKING:
    from trainwright.estimator.structure import Structure

_WIDTH = 120  # for output to a file or pipe
out = Console(
    highlight=False, width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _WIDTH
)
err = Console(stderr=True, highlight=False)

# Without lines between columns. In a file or a pipe tables have no frame, so that other programs
# can read them.
_FRAME = Box("╭──╮\n│  │\n├──┤\n│  │\n├──┤\n├──┤\n│  │\n╰──╯\n")
_OF_POWER = ("energy_j", "cost")


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()
) -> None:
    """Print a table; `right` are the right-aligned columns."""
    out.print(grid(title, columns, rows, right=right))
    out.print()


def grid(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[int] = (),
    whole: Sequence[int] = (0,),
) -> Table:
    """A table; `right` are the right-aligned columns, `whole` those that are never folded."""
    found = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=_FRAME if out.is_terminal else None,
        border_style="dim",
        pad_edge=out.is_terminal,
        padding=(0, 1) if out.is_terminal else (0, 2, 0, 0),
        collapse_padding=True,
        show_header=any(columns),
    )
    for number, column in enumerate(columns):
        found.add_column(
            column,
            justify="right" if number in right else "left",
            header_style="dim",
            overflow="fold",
            no_wrap=number in whole,
        )
    for row in rows:
        found.add_row(*(escape(cell) for cell in row))
    return found


def facts(title: str, lines: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one per line. Long values are not wrapped, so one can copy them."""
    out.print(title, style="bold", markup=False)
    for name, value in lines:
        out.print(f"  {name:<22} {value}", soft_wrap=True, markup=False)
    out.print()


def layers(structure: Structure, depth: int) -> None:
    """Print a model's modules as a tree with counts, then the totals."""
    from trainwright.estimator.memory.step_memory import peak_bytes
    from trainwright.tasks.cli.screens.layer_table import layer_rows

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    grid.add_column("layer", header_style="dim", overflow="ellipsis", no_wrap=True, ratio=1)
    grid.add_column("kind", header_style="dim", overflow="ellipsis", no_wrap=True, max_width=24)
    for name in ("output shape", "parameters", "forward FLOPs"):
        grid.add_column(name, header_style="dim", justify="right", no_wrap=True)
    for row in layer_rows(structure, depth):
        grid.add_row(
            escape("  " * row.depth + row.name),
            "" if row.kind == row.name else escape(row.kind),
            " x ".join(map(str, row.output_shape)) or "-",
            "-" if row.parameters is None else f"{row.parameters:,}" if row.parameters else "0",
            "-" if row.forward_flops is None else amount(row.forward_flops),
            style="dim" if row.parameters is None else "",
        )
    out.print(grid)
    out.print()
    batch = structure.batch_size
    fused = any(one.family == "rnn" for one in structure.trace)
    uncounted = (
        [("not counted", "FLOPs of fused recurrent layers (as in torch's FlopCounterMode)")]
        if fused
        else []
    )
    facts(
        f"total, at batch {batch}",
        [
            ("parameters", f"{structure.parameters:,}  ({size(structure.parameter_bytes)})"),
            (
                "forward",
                f"{amount(structure.forward_flops_per_sample * batch, 'FLOP')}  "
                f"({amount(structure.forward_flops_per_sample, 'FLOP')} per sample)",
            ),
            (
                "activations kept",
                f"{size(structure.activation_bytes_per_sample * batch)}  "
                f"({size(structure.activation_bytes_per_sample)} per sample)",
            ),
            (
                "peak memory of a step",
                f"{size(peak_bytes(structure, batch))}  "
                f"({structure.optimizer}, {structure.precision})",
            ),
            ("operations in a step", f"{sum(structure.operations.values()):,}"),
            *([("cuts into stages", words)] if (words := _cut_words(structure)) else []),
            ("read by", structure.method),
            *uncounted,
        ],
    )


def _cut_words(structure: Structure) -> str:
    """At how many places a model can be cut, or why at none; empty: not known."""
    if structure.not_cut:
        return f"none: {structure.not_cut}"
    if not structure.units:
        return ""
    crossing = [one.crossing_bytes.per_sample for one in structure.units[:-1]]
    between = " to ".join(dict.fromkeys(size(one) for one in (min(crossing), max(crossing))))
    places = "place" if len(crossing) == 1 else "places"
    return f"{len(crossing)} {places}; {between} per sample cross"


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner, and a line for each notice, once."""
    told: set[str] = set()

    def tell(event: dict[str, Any]) -> None:
        if event["event"] == "notice" and event["message"] not in told:
            told.add(event["message"])
            err.print(f"note       {event['message']}", markup=False, soft_wrap=True)

    with progress.listening(tell), err.status(what):
        yield


class Countdown:
    """A progress bar for `calibrate`, driven by its events."""

    def __init__(self, what: str) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            console=err,
            transient=True,
            disable=not err.is_interactive,  # in a file it would only write an empty line
        )
        self._task = self._progress.add_task(what, total=None, note="loading torch")

    def __enter__(self) -> Countdown:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] != "calibrate":
            return
        done, total = event.get("elapsed_s"), event["budget_s"]
        if done is None:
            self._progress.update(self._task, note=escape(event["message"]))
            return
        note = f"{done:.0f} of {total:.0f} s  {event['message']}"
        self._progress.update(
            self._task, completed=min(done, total), total=total, note=escape(note)
        )


def state(state: str, stored: bool | None) -> str:
    """The state of a run. `stored`: whether its model is; None before the training has ended."""
    return "trained, not stored" if state == "success" and stored is False else state


def show_run(document: dict[str, Any]) -> None:
    """The closing summary of a run."""
    out.print()
    trained = document["measured"] is not None
    lines = [
        ("state", state(document["state"], document["manifest"] is not None if trained else None))
    ]
    lines += [
        (name.replace("_", " "), f"{value:.4f}") for name, value in document["metrics"].items()
    ]
    if target := document["target"]:
        reached = {True: "reached", False: "not reached", None: "not known yet"}[
            document["target_reached"]
        ]
        lines.append(("target", f"{target['metric']} {target['value']:g}: {reached}"))
    if model := document["recommended"]:
        recipe = ", ".join(
            f"{name.removeprefix('train.')} {value}" for name, value in model["recipe"].items()
        )
        lines += [("recommended model", f"{model['name']}: {model['why']}"), ("its recipe", recipe)]
    early = document["early_stopped"]
    if early is not None:
        lines.append(("early stopping", early["reason"]))
    if document["learning_rate"] is not None:
        lines.append(("learning rate", f"{document['learning_rate']:.3g}"))
        lines.append(("reason", document["learning_rate_reason"]))
        if document["learning_rate_plot"] is not None:
            lines.append(("plot of the search", document["learning_rate_plot"]))
    if document["global_batch_size"] is not None:
        lines.append(("global batch", str(document["global_batch_size"])))
    if layout := document["layout"]:
        why = f" ({layout['rule']})" if layout["rule"] else ""
        lines.append(("layout", f"{layout['words'] or layout['name']}{why}"))
        lines += [
            ("not chosen", f"{other['words']}; {other['reason']}") for other in layout["others"]
        ]
    if document["measured"] is None and document["checkpoints"]:
        lines.append(
            (
                "newest checkpoint",
                f"of step {document['trained_steps']}: {document['checkpoints'][-1]}",
            )
        )
    if document["learned_from"]:
        lines.append(
            ("predicted from", f"calibration and {document['learned_from']} earlier run(s)")
        )
    if document.get("error"):
        lines.append(("error", f"{document['error']['kind']}: {document['error']['message']}"))
    lines.append(("run", document["run"]))
    if document["report"]:
        command = "trainwright" if shutil.which("trainwright") else sys.argv[0]
        lines.append(
            ("report", f"{command} show {document['run'].rsplit('/', 1)[-1]} --report report.html")
        )
    for one in document["exports"]:
        value = one["metrics"]["exported"]
        where = f"{document['run']}/{EXPORT_FOLDER}{one['kind']}"
        lines.append((f"exported as {one['kind']}", f"{one['metric']} {value:.4f}, {where}"))
    facts(document["job"], lines)
    predicted, measured = document["predicted"], document["measured"] or {}
    if predicted:
        rows = []
        for label, field, show in (
            ("step time", "step_time_s", seconds),
            ("duration", "duration_s", seconds),
            ("energy", "energy_j", lambda value: amount(value, "J")),
            (f"cost, {money(document['currency'])[0][1]}", "cost", plain),
        ):
            value = measured.get(field)
            if isinstance(value, dict):
                value = value["median"]
            inside = ""
            ends = predicted.get(field) or {"low": 0.0, "high": 0.0}
            # The time of an emulated device is set, so it has no interval.
            comparable = early is None or field == "step_time_s"  # the rest is of all epochs
            if ends["low"] < ends["high"] and value is not None and comparable:
                inside = "inside" if ends["low"] <= value <= ends["high"] else "outside"
            by = (
                " by datasheet"
                if field in _OF_POWER and measured.get("energy_source") == "datasheet"
                else ""
            )
            shown = show(value) + by if value is not None else "-"
            rows.append((label, interval(predicted.get(field), show), shown, inside))
        table(
            "predicted and measured",
            ("", "predicted (90 % interval)", "measured", "interval"),
            rows,
            right=(1, 2),
        )
    if document["devices"]:
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
            for device in document["devices"]
        ]
        columns = ("device", "batch", "own step time", "waited", "memory", "samples", "CPU share")
        table("devices", columns, used, right=(1, 2, 3, 4, 5))
    if document["steps"]:
        known = list(document["steps"].items())
        took = [(name, seconds(value)) for name, value in known] + [
            ("total", seconds(sum(value for _, value in known)))
        ]
        table("steps", ("step", "duration"), took, right=(1,))
