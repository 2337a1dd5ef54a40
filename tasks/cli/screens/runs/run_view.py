"""Shows a run's events on stderr: a line for each finished step, and the current work below."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import TaskID
from rich.text import Text

from trainwright.tasks.cli.screens.console import err, progress_line
from trainwright.tasks.cli.screens.runs.train_view import TrainView
from trainwright.tasks.errors import Interrupted
from trainwright.tasks.event_lines import NAMED, MovingLines, line_of, moving_text

_BEGINS = ("preload", "prepare", "stage")
"""Events that name what goes on now, until the next one."""
_OF_TRAINING = ("ranks", "train", "epoch", "step")
_STYLES = {"note": "dim", "lost": "bold yellow"}


class Watch:
    """Shows a run's events: one line per finished step, and a progress bar."""

    def __init__(self) -> None:
        self._progress = progress_line(auto_refresh=False)
        self._task: TaskID | None = None
        self._begun = ""
        self._said: dict[str, str] = {}
        self._training = TrainView()
        self._moving = MovingLines(lambda text: self._line(f"{'':<{NAMED}} {text}"))
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
        if kind in _OF_TRAINING and not err.is_terminal:
            self._moving(event)
        if kind == "step":
            self._step(event)
        elif kind in _BEGINS:
            self._begin(moving_text(event) or f"starting {event['name']}", kind)
        elif (line := line_of(event)) is not None:
            if line != self._said.get(kind):  # each rank or waiting process may report it
                self._line(line)
            if kind in ("notice", "queue"):
                self._said[kind] = line
        elif self._task is not None and kind != "train":
            self._update(event)

    def _step(self, event: dict[str, Any]) -> None:
        if event["state"] == "started":
            self._begin(event["name"])
            return
        self._end()
        if event["state"] == "failed":
            stopped = event["error"]["kind"] == Interrupted.kind
            words = "stopped" if stopped else "[red]failed[/]"
            err.print(f"[bold]{event['name']:<{NAMED}}[/] {words}")
            if "page" in event["error"]:  # of rejected data
                self._line(f"page       {event['error']['page']}")
        elif (line := line_of(event)) is not None:
            self._line(line)

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

    def _begin(self, name: str, kind: str = "") -> None:
        if self._task is not None and kind and kind == self._begun:
            self._progress.update(self._task, description=escape(name))
            return
        self._end()
        self._begun = kind
        self._task = self._progress.add_task(escape(name), total=None, note="")

    def _end(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def _line(self, text: str) -> None:
        """Print a line: what it is about in bold; dim, if it is about a part of a step."""
        name = text[:NAMED]
        style = _STYLES.get(name.strip(), "bold")
        line = Text(text, style="dim" if not name.strip() else "")
        line.stylize(style, 0, len(name.rstrip()))
        err.print(line, soft_wrap=True)
