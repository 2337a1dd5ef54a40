"""Measures what a rank does in its steps, by kind of action.

The rank says what it has done since it said so last. On the host, that is the time in between,
without waits for other ranks. A CUDA device works while the host goes on, so there the time is that
between two events on the device. A step keeps readings of clocks only, and they are evaluated at
the end of the training: evaluating them in each step would slow down small models.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.runs.artefacts.step_kinds import ComputeKind, SentKind, WaitKind
from trainwright.tasks.train.exchange.collective import Collective

MOST_STEPS = 512
_COMPUTE, _WAIT, _SENT = get_args(ComputeKind), get_args(WaitKind), get_args(SentKind)


class _Reading(NamedTuple):
    """What was done up to a moment, with the clocks then."""

    computed: ComputeKind | None
    waited: WaitKind
    now_s: float
    wait_s: float
    """spent waiting so far"""
    event: Any = None


class _Step(NamedTuple):
    """The readings of a step, the first at its beginning."""

    readings: list[_Reading]
    own_s: float
    sent_bytes: tuple[float, float]


class StepActions:
    """Seconds and bytes of a rank's latest steps.

    Each step calls `begin`, `done` for each thing, and `end`, which a step that is not whole omits.
    """

    def __init__(self, exchange: Collective, device: torch.device) -> None:
        self._exchange, self._device = exchange, device
        self._on_gpu = device.type == "cuda"
        self._steps: deque[_Step] = deque(maxlen=MOST_STEPS)
        self._readings: list[_Reading] = []
        self._bytes = self._sent()

    def _sent(self) -> tuple[float, float]:
        """The bytes of sums and of transfers so far. A plain `Collective` counts none."""
        summed, sent = (getattr(self._exchange, one, 0) for one in ("ring_bytes", "sent_bytes"))
        return float(summed), float(sent)

    def begin(self) -> None:
        """A step begins."""
        self._readings, self._bytes = [], self._sent()
        self.done(None)

    def done(self, computed: ComputeKind | None, waited: WaitKind = "agree") -> None:
        """What the rank has computed and waited for since the last call; None: the loop's work."""
        event = None
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
        clocks = time.perf_counter(), self._exchange.wait_s
        self._readings.append(_Reading(computed, waited, *clocks, event))

    def end(self, own_s: float) -> None:
        """The step has ended, and took the rank so many seconds without waiting."""
        readings, (summed, sent) = self._readings, self._sent()
        if self._on_gpu:
            readings = _by_device(readings)
        self._steps.append(_Step(readings, own_s, (summed - self._bytes[0], sent - self._bytes[1])))

    def summary(self) -> dict[str, dict[str, float]] | None:
        """The usual step of the latest ones, as the fields of `StepByKind`; None without steps."""
        if not self._steps:
            return None
        each = [_by_kind(one) for one in self._steps]

        def usual(names: Iterable[str], end: str = "") -> dict[str, float]:
            return {name: _usual([one[name + end] for one in each]) for name in names}

        return {
            "compute_s": usual(_COMPUTE),
            "wait_s": usual(_WAIT),
            "sent_bytes": usual(_SENT, " bytes"),
        }


def _by_device(readings: list[_Reading]) -> list[_Reading]:
    """The readings by the device's own clock."""
    first, last = readings[0].event, readings[-1].event
    last.synchronize()
    return [one._replace(now_s=first.elapsed_time(one.event) / 1e3, event=None) for one in readings]


def _by_kind(step: _Step) -> dict[str, float]:
    """Seconds and bytes of a step, by kind."""
    found = dict.fromkeys((*_COMPUTE, *_WAIT), 0.0)
    for before, after in zip(step.readings, step.readings[1:], strict=False):
        waited_s = after.wait_s - before.wait_s
        found[after.waited] += waited_s
        if after.computed is not None:
            found[after.computed] += max(0.0, after.now_s - before.now_s - waited_s)
    found["loop"] = max(0.0, step.own_s - sum(found[kind] for kind in _COMPUTE))
    return found | dict(zip((f"{kind} bytes" for kind in _SENT), step.sent_bytes, strict=True))


def _usual(values: list[float]) -> float:
    """The median; the mean of what is done in fewer than half of the steps, such as averages."""
    return statistics.median(values) or statistics.fmean(values)
