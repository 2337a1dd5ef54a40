"""Shows a run's events on stderr: a line for each finished step, and the current work below."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from trainwright.tasks import chain
from trainwright.tasks.cli.screens.console import err
from trainwright.tasks.cli.screens.runs.train_view import TrainView
from trainwright.tasks.errors import Interrupted
from trainwright.tasks.spec.metric_names import METRICS, leading_metric
from trainwright.tasks.units import metric

_NAMED = 10
"""Characters in which a line names what it is about."""
_STYLES = {"note": "dim", "lost": "bold yellow"}


class Watch:
    """Shows a run's events: one line per finished step, and a progress bar."""

    def __init__(self) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(24, complete_style="cyan", finished_style="cyan"),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(*columns, console=err, auto_refresh=False)
        self._task: TaskID | None = None
        self._noticed = ""
        self._queued = ""
        self._training = TrainView()
        self._live = Live(
            console=err, get_renderable=self._now, refresh_per_second=4, transient=True
        )

    def _now(self) -> RenderableType:
        return self._training if self._training.training else self._progress

    def __enter__(self) -> Watch:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        self._training.take(event)
        if kind == "run":
            self._line(f"run        {event['run']}")
        elif kind == "notice":
            if event["message"] != self._noticed:  # each rank may report it
                self._line(f"note       {event['message']}")
            self._noticed = event["message"]
        elif kind == "rank" and event["state"] != "loaded":
            self._line(f"lost       rank {event['rank']} ({event['device']}) {event['state']}")
        elif kind == "world":
            self._line(f"ranks      training continues with {len(event['ranks'])}")
        elif kind == "queue" and "place" in event:
            held = f"; held by {event['held_by']}" if event.get("held_by") else ""
            place = f"queue      place {event['place']} of {event['waiting']}{held}"
            if place != self._queued:  # each waiting process reports it
                self._line(place)
            self._queued = place
        elif kind == "preload":
            share = event["bytes"] / max(1, event["of"])
            self._begin(f"data to {event['host']}: {share:.0%} of {event['of'] / 1e6:.1f} MB")
        elif kind == "prepare":
            total = f" of {event['of']:,}" if event["of"] else ""
            done = "prepared" if event["of"] else "looked at"
            self._begin(f"data: {event['rows']:,}{total} rows {done}")
        elif kind == "stage":
            self._begin(f"starting {event['name']}")
        elif kind == "step":
            self._step(event)
        elif kind == "epoch":
            known: dict[str, float] = {
                name: event[name] for name in METRICS if event.get(name) is not None
            }
            names = dict.fromkeys(("train_loss", "loss", leading_metric(known)))
            figures = "  ".join(
                f"{name.replace('_', ' ')} {metric(event[name])}"
                for name in names
                if name is not None and event.get(name) is not None
            )
            self._line(f"           epoch {event['epoch'] + 1:>3}  {figures}")
        elif kind == "split":
            self._line(
                f"           split {event.get('batch_sizes')} from step {event.get('step')}: "
                f"{event.get('reason', '')}"
            )
        elif kind == "train":
            if not err.is_terminal and (line := self._training.due_line()) is not None:
                self._line(f"           {line}")
        elif self._task is not None:
            self._update(event)

    def _step(self, event: dict[str, Any]) -> None:
        name = event["name"]
        if event["state"] == "started":
            self._begin(name)
            return
        self._end()
        if event["state"] == "failed":
            stopped = event["error"]["kind"] == Interrupted.kind
            err.print(f"[bold]{name:<10}[/] {'stopped' if stopped else '[red]failed[/]'}")
            if "page" in event["error"]:  # of rejected data
                self._line(f"page       {event['error']['page']}")
        elif name != "release":
            summary = chain.step(name).summary(event["summary"])
            self._line(f"{name:<10} {event['seconds']:6.1f} s  {summary}")

    def _update(self, event: dict[str, Any]) -> None:
        assert self._task is not None
        done, total = event.get("step"), event.get("steps")
        note = "  ".join(
            text
            for text in (
                f"step {done}/{total}" if done is not None and total else "",
                f"loss {event['loss']:.4f}" if event.get("loss") is not None else "",
                str(event.get("message", "")),
            )
            if text
        )
        self._progress.update(self._task, completed=done, total=total, note=escape(note))

    def _begin(self, name: str) -> None:
        self._end()
        self._task = self._progress.add_task(name, total=None, note="")

    def _end(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def _line(self, text: str) -> None:
        """Print a line: what it is about in bold; dim, if it is about a part of a step."""
        name = text[:_NAMED]
        style = _STYLES.get(name.strip(), "bold")
        line = Text(text, style="dim" if not name.strip() else "")
        line.stylize(style, 0, len(name.rstrip()))
        err.print(line, soft_wrap=True)
