"""Shows a training in a terminal, from its events: progress, and a line for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainwright.tasks.train_pace import TrainPace
from trainwright.tasks.units import seconds, size

_DEVICE = 22
_COLUMNS = {
    "batch": 5,
    "step": 7,
    "compute": 7,
    "wait": 5,
    "comm.": 5,
    "samples/s": 9,
    "memory": 8,
}
"""The columns beside the devices' names, with their widths in characters."""
_LEFT_OUT_FIRST = ("comm.", "wait", "compute", "samples/s", "memory")


class TrainView(TrainPace):
    """Renders the state of a training."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._latest is None:
            yield Text()
            return
        width = options.max_width
        yield Text(self.headline(width), no_wrap=True, overflow="ellipsis")
        bar = Table.grid(expand=True)
        bar.add_row(
            ProgressBar(
                total=self._latest["steps"],
                completed=self._latest["step"],
                complete_style="cyan",
                finished_style="cyan",
            )
        )
        yield bar
        yield self._table(_columns_within(width))

    def _table(self, columns: Sequence[str]) -> Table:
        grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=False)
        grid.add_column(
            "device", header_style="dim", no_wrap=True, overflow="ellipsis", max_width=_DEVICE
        )
        for name in columns:
            grid.add_column(
                name, header_style="dim", justify="right", no_wrap=True, min_width=_COLUMNS[name]
            )
        latest = self._latest or {}
        known = {one["rank"]: one for one in latest.get("ranks", [])}
        step_s = latest.get("step_time_s")
        for number in sorted({*known, *range(len(self._devices))}):
            name = self._devices[number] if number < len(self._devices) else f"rank {number}"
            one = known.get(number)
            if one is None:
                grid.add_row(escape(name), *["-"] * (len(columns) - 1), "out", style="dim")
                continue
            parts_s = [one[field] for field in ("compute_s", "wait_s", "communication_s")]
            shares = [
                f"{100 * part / sum(parts_s):.0f} %" if sum(parts_s) else "-" for part in parts_s
            ]
            compute, wait, sums = shares
            cells = {
                "batch": str(one["batch_size"]),
                "step": seconds(step_s),
                "compute": compute,
                "wait": wait,
                "comm.": sums,
                "samples/s": f"{one['samples_per_s']:.0f}",
                "memory": size(one.get("memory_bytes")),
            }
            grid.add_row(escape(name), *(cells[column] for column in columns))
        return grid


def _columns_within(width: int) -> list[str]:
    """The columns beside the devices' names for which a line of `width` has room."""
    kept = dict(_COLUMNS)
    for name in _LEFT_OUT_FIRST:
        if _DEVICE + sum(kept.values()) + len(kept) <= width:
            break
        del kept[name]
    return list(kept)
