"""Prints for a person: progress on stderr, tables on stdout, aligned figures with units."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.box import Box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from trainwright.tasks import progress
from trainwright.tasks.units import amount, size

if TYPE_CHECKING:
    from trainwright.estimator.structure import Structure

KEPT = "\u00a0"
"""A space at which no line of `facts` ends."""
_WIDTH = 120  # for output to a file or pipe
out = Console(
    highlight=False, width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _WIDTH
)
err = Console(stderr=True, highlight=False)

# Without lines between columns. In a file or a pipe tables have no frame, so that other programs
# can read them.
_FRAME = Box("╭──╮\n│  │\n├──┤\n│  │\n├──┤\n├──┤\n│  │\n╰──╯\n")


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Sequence[int] = (),
) -> None:
    """Print a table; `right` are the right-aligned columns."""
    out.print(grid(title, columns, rows, right=right))
    out.print()


def grid(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
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
        found.add_row(*(escape(one) if isinstance(one, str) else one for one in row))
    return found


def facts(
    title: str,
    lines: Iterable[tuple[str, str]],
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print names and values, one per line; `styles` by name.

    In a terminal, long values continue below where they begin, but not at KEPT. An address is
    never cut, so that one can copy it.
    """
    out.print(title, style="bold", markup=False)
    lines = list(lines)
    wide = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        out.print(f"  {name:<{wide}}  ", style="dim", end="", markup=False)
        room = max(20, out.width - wide - 4)
        parts = (
            textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
            if out.is_terminal
            else []
        )
        text = f"\n{' ' * (wide + 4)}".join(parts or [value]).replace(KEPT, " ")
        out.print(text, style=(styles or {}).get(name, ""), soft_wrap=True, markup=False)
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


def progress_line(**options: Any) -> Progress:
    """What goes on, a bar, and a note, which alone is cut to the width of the terminal."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(24, complete_style="cyan", finished_style="cyan"),
        TextColumn(
            "{task.fields[note]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        ),
        console=err,
        expand=True,
        **options,
    )


class Countdown:
    """A progress bar for `calibrate`, driven by its events."""

    def __init__(self, what: str) -> None:
        self._progress = progress_line(
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
