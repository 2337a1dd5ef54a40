"""A run's events as lines for people: the same in a terminal and in the log of an Airflow task.

A line names what it is about in NAMED characters; one about a part of a step begins with spaces.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from trainwright.tasks.spec.metric_names import METRICS, leading_metric
from trainwright.tasks.train_pace import TrainPace
from trainwright.tasks.units import metric, size

NAMED = 10
LINE_EVERY_S = 10.0
"""Between lines about what goes on, where a line can't be overwritten."""


def line_of(event: dict[str, Any]) -> str | None:
    """An event's line; None for one that only moves a bar."""
    words = _WORDS.get(event["event"])
    return words(event) if words is not None else None


def _line(about: str, text: str) -> str:
    return f"{about:<{NAMED}} {text}"


def _rank(event: dict[str, Any]) -> str | None:
    if event["state"] == "loaded":
        return None
    return _line("lost", f"rank {event['rank']} ({event['device']}) {event['state']}")


def _queue(event: dict[str, Any]) -> str | None:
    if "place" not in event:
        return None
    held = f"; held by {event['held_by']}" if event.get("held_by") else ""
    return _line("queue", f"place {event['place']} of {event['waiting']}{held}")


def _epoch(event: dict[str, Any]) -> str:
    known: dict[str, float] = {name: event[name] for name in METRICS if event.get(name) is not None}
    names = dict.fromkeys(("train_loss", "loss", leading_metric(known)))
    figures = "  ".join(
        f"{name.replace('_', ' ')} {metric(event[name])}"
        for name in names
        if name is not None and event.get(name) is not None
    )
    return _line("", f"epoch {event['epoch'] + 1:>3}  {figures}")


def _split(event: dict[str, Any]) -> str:
    sizes, step = event.get("batch_sizes"), event.get("step")
    return _line("", f"split {sizes} from step {step}: {event.get('reason', '')}")


def _step(event: dict[str, Any]) -> str | None:
    if event["state"] != "done" or not event.get("line"):
        return None
    return _line(event["name"], f"{event['seconds']:6.1f} s  {event['line']}")


_WORDS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "run": lambda event: _line("run", event["run"]),
    "notice": lambda event: _line("note", event["message"]),
    "rank": _rank,
    "world": lambda event: _line("ranks", f"training continues with {len(event['ranks'])}"),
    "queue": _queue,
    "epoch": _epoch,
    "split": _split,
    "step": _step,
}


class MovingLines:
    """A listener that writes a line about what goes on, if none was due for LINE_EVERY_S seconds.

    For a file or a log. What begins is written at once, and an epoch's own line counts.
    """

    def __init__(
        self, write: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._now = write, now
        self._pace = TrainPace(now)
        self._line_at = -math.inf
        self._about = ""

    def __call__(self, event: dict[str, Any]) -> None:
        self._pace.take(event)
        kind = event["event"]
        if kind == "epoch":
            self._line_at = self._now()
        text = self._pace.headline() if kind == "train" else moving_text(event)
        if not text:
            return
        if kind == self._about and self._now() - self._line_at < LINE_EVERY_S:
            return
        self._about, self._line_at = kind, self._now()
        self._write(text)


def moving_text(event: dict[str, Any]) -> str:
    """What goes on in a step other than training, in words; empty if the event says nothing."""
    match event["event"]:
        case "calibrate":
            done = event.get("elapsed_s")
            of = f"{done:.0f} of {event['budget_s']:.0f} s  " if done is not None else ""
            return f"calibrating  {of}{event['message']}"
        case "prepare":
            total = f" of {event['of']:,}" if event["of"] else ""
            return f"data: {event['rows']:,}{total} rows {'prepared' if total else 'looked at'}"
        case "preload":
            share = event["bytes"] / max(1, event["of"])
            return f"data to {event['host']}: {share:.0%} of {size(event['of'])}"
        case "fetch":
            total = f" of {size(event['of'])}" if event.get("of") else ""
            return f"data: {size(event['bytes'])}{total} fetched"
        case "ramp":
            loss = f", loss {event['loss']:.4f}" if event.get("loss") is not None else ""
            return f"step {event['step']}, learning rate {event['learning_rate']:.2e}{loss}"
        case "export":
            took = f", {event['took_s']:.1f} s" if event.get("took_s") is not None else ""
            return f"{event['kind']}: {event['doing']}{took}"
    return ""
