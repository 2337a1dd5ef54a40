"""A training's progress in one line, from its events: step, epoch, loss, speed, the time left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainwright.tasks.units import seconds

_BETWEEN = "  "
_LONGEST = {"loss": 12, "speed": 16, "left": len("59 min 59 s left")}
_LEFT_OUT_FIRST = ("lr", "speed", "loss", "epoch")


class TrainPace:
    """The state of a training, from its events. `now` returns seconds."""

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

    def headline(self, width: int | None = None) -> str:
        """The progress in one line, of the parts that fit `width` characters at their longest.

        Each figure keeps its place while others change, and no part comes and goes.
        """
        event = self._latest or {}
        steps = str(event["steps"])
        parts = {"step": f"step {event['step']:>{len(steps)}}/{steps}"}
        if event.get("epochs"):
            epochs = str(event["epochs"])
            parts["epoch"] = f"epoch {event['epoch'] + 1:>{len(epochs)}}/{epochs}"
        if event.get("loss") is not None:
            parts["loss"] = f"loss {event['loss']:<6.4f}"
        if event.get("learning_rate") is not None:
            parts["lr"] = f"lr {event['learning_rate']:.2e}"
        if event.get("samples_per_s") is not None:
            parts["speed"] = f"{event['samples_per_s']:>5.0f} samples/s"
        left_s = self.left_s()
        parts["left"] = f"{seconds(left_s)} left" if left_s is not None else ""
        for name in _LEFT_OUT_FIRST:
            longest = sum(max(len(text), _LONGEST.get(part, 0)) for part, text in parts.items())
            if width is None or longest + len(_BETWEEN) * (len(parts) - 1) <= width:
                break
            parts.pop(name, None)
        return _BETWEEN.join(text for text in parts.values() if text)
