"""Shows a training in a terminal, from its events: progress, and a line for each rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainwright.tasks.units import seconds, size

LINE_EVERY_S = 10.0
"""Between lines if the output is not a terminal."""
_COLUMNS = (
    ("batch", 5),
    ("step", 7),
    ("compute", 7),
    ("wait", 5),
    ("comm.", 5),
    ("samples/s", 9),
    ("memory", 8),
)


class TrainView:
    """Collects events of a training and renders its state. `now` returns seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._reset([])

    def _reset(self, devices: list[str]) -> None:
        """Forget an earlier launch."""
        self._devices = devices
        self._states: dict[int, str] = {}
        self._latest: dict[str, Any] | None = None
        self._latest_at = 0.0
        self._began: tuple[int, float] | None = None
        self._line_at = -math.inf

    @property
    def training(self) -> bool:
        """Whether there is something to show."""
        return self._latest is not None

    def take(self, event: dict[str, Any]) -> None:
        """Process an event."""
        kind = event["event"]
        if kind == "ranks":
            self._reset(list(event["devices"]))
        elif kind == "rank":
            self._states[event["rank"]] = event["state"]
        elif kind == "train" and event.get("steps"):
            if self._began is None or event["step"] < self._began[0]:
                self._began = event["step"], self._now()
            self._latest, self._latest_at = event, self._now()
        elif kind == "step" and event["name"] == "train" and event["state"] != "started":
            self._latest = None

    def left_s(self) -> float | None:
        """Seconds to the last step, at the mean pace so far; None if it is not known yet."""
        if self._latest is None or self._began is None:
            return None
        done, began = self._latest["step"] - self._began[0], self._began[1]
        left = self._latest["steps"] - self._latest["step"]
        return left * (self._latest_at - began) / done if done > 0 else None

    def headline(self) -> str:
        """The progress in one line. Each figure keeps its place while others change."""
        event = self._latest or {}
        steps = str(event["steps"])
        parts = [f"step {event['step']:>{len(steps)}}/{steps}"]
        if event.get("epochs"):
            epochs = str(event["epochs"])
            parts.append(f"epoch {event['epoch'] + 1:>{len(epochs)}}/{epochs}")
        if event.get("loss") is not None:
            parts.append(f"loss {event['loss']:<6.4f}")
        if event.get("learning_rate") is not None:
            parts.append(f"lr {event['learning_rate']:.2e}")
        if event.get("samples_per_s") is not None:
            parts.append(f"{event['samples_per_s']:>5.0f} samples/s")
        left_s = self.left_s()
        if left_s is not None:
            parts.append(f"{seconds(left_s)} left")
        return "  ".join(parts)

    def due_line(self) -> str | None:
        """The headline every LINE_EVERY_S seconds, for output that is not a terminal; else None."""
        if self._latest is None or self._now() - self._line_at < LINE_EVERY_S:
            return None
        self._line_at = self._now()
        return self.headline()

    def __rich__(self) -> RenderableType:
        if self._latest is None:
            return Text()
        bar = Table.grid(expand=True)
        bar.add_row(
            ProgressBar(
                total=self._latest["steps"],
                completed=self._latest["step"],
                complete_style="cyan",
                finished_style="cyan",
            )
        )
        return Group(Text(self.headline(), no_wrap=True, overflow="ellipsis"), bar, self._table())

    def _table(self) -> Table:
        grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=False)
        grid.add_column(
            "device", header_style="dim", no_wrap=True, overflow="ellipsis", max_width=22
        )
        for name, width in _COLUMNS:
            grid.add_column(
                name, header_style="dim", justify="right", no_wrap=True, min_width=width
            )
        latest = self._latest or {}
        known = {one["rank"]: one for one in latest.get("ranks", [])}
        step_s = latest.get("step_time_s")
        for number in sorted({*known, *range(len(self._devices))}):
            name = self._devices[number] if number < len(self._devices) else f"rank {number}"
            one = known.get(number)
            if one is None:
                grid.add_row(escape(name), *["-"] * (len(_COLUMNS) - 1), "out", style="dim")
                continue
            parts_s = [one[field] for field in ("compute_s", "wait_s", "communication_s")]
            shares = [
                f"{100 * part / sum(parts_s):.0f} %" if sum(parts_s) else "-" for part in parts_s
            ]
            grid.add_row(
                escape(name),
                str(one["batch_size"]),
                seconds(step_s),
                *shares,
                f"{one['samples_per_s']:.0f}",
                size(one.get("memory_bytes")),
            )
        return grid
