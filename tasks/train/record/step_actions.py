"""Measures what a rank does in its steps, by kind of action.

The rank says what it has done since it said so last. On the host, that is the time in between,
without waits for other ranks. A CUDA device works while the host goes on, so there the time is that
between two events on the device. A step keeps readings of clocks only, and they are evaluated at
the end of the training: evaluating them in each step would slow down small models.

Averages happen in few steps, and between steps too: at the ends of epochs and for checkpoints. What
they wait and send is the mean of all steps, which is what a plan predicts.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.runs.artefacts.step_kinds import (
    ComputeKind,
    PassKind,
    SentKind,
    WaitKind,
)
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
    passed: tuple[PassKind, int] | None = None
    """the stage's pass that has ended, and its micro-batch"""


class _Step(NamedTuple):
    """The readings of a step, the first at its beginning."""

    readings: list[_Reading]
    own_s: float
    sent_bytes: tuple[float, float]


class StepActions:
    """Seconds and bytes of a rank's latest steps.

    Each step calls `begin`, `done` for each thing, and `end`. Averages may also be between steps.
    """

    def __init__(self, exchange: Collective, device: torch.device) -> None:
        self._exchange, self._device = exchange, device
        self._on_gpu = device.type == "cuda"
        self._steps: deque[_Step] = deque(maxlen=MOST_STEPS)
        self._readings: list[_Reading] = []
        self._bytes = self._sent()
        self._count = 0
        """of steps, with those that are not kept"""
        self._wait_s, self._sum_bytes, self._transfer_bytes = 0.0, 0.0, 0.0
        """of all averages"""

    def _sent(self) -> tuple[float, float]:
        """The bytes of sums and of transfers so far. A plain `Collective` counts none."""
        summed, sent = (getattr(self._exchange, one, 0) for one in ("ring_bytes", "sent_bytes"))
        return float(summed), float(sent)

    def begin(self) -> None:
        """A step begins."""
        self._readings, self._bytes = [], self._sent()
        self.done(None)

    def done(
        self,
        computed: ComputeKind | None,
        waited: WaitKind = "agree",
        passed: tuple[PassKind, int] | None = None,
    ) -> None:
        """What the rank has computed and waited for since the last call; None: the loop's work.

        `passed`: of a stage, the pass that has ended.
        """
        event = None
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
        clocks = time.perf_counter(), self._exchange.wait_s
        self._readings.append(_Reading(computed, waited, *clocks, event, passed))

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """The rank averages, in a step or between two."""
        self.done(None)
        waited_s, sent = self._exchange.wait_s, self._sent()
        yield
        self._wait_s += self._exchange.wait_s - waited_s
        summed, transferred = (new - old for new, old in zip(self._sent(), sent, strict=True))
        self._sum_bytes += summed
        self._transfer_bytes += transferred
        self._bytes = self._bytes[0] + summed, self._bytes[1] + transferred
        self.done("update", "average")

    def end(self, own_s: float, *, whole: bool = True) -> None:
        """The step has ended, and took the rank so many seconds without waiting.

        A step that is not `whole`, the last one of an epoch, counts for the means only.
        """
        self._count += 1
        if not whole:
            return
        readings, (summed, sent) = self._readings, self._sent()
        if self._on_gpu:
            readings = _by_device(readings)
        self._steps.append(_Step(readings, own_s, (summed - self._bytes[0], sent - self._bytes[1])))

    def summary(self) -> dict[str, Any] | None:
        """The usual step of the latest ones, as the fields of `StepByKind`; None without steps."""
        if not self._steps:
            return None
        each = [_by_kind(one) for one in self._steps]

        def usual(names: Iterable[str], end: str = "") -> dict[str, float]:
            return {name: _usual([one[name + end] for one in each]) for name in names}

        averages = {"sum": self._sum_bytes, "transfer": self._transfer_bytes}
        return {
            "compute_s": usual(_COMPUTE),
            "wait_s": usual(_WAIT) | {"average": self._wait_s / self._count},
            "sent_bytes": {
                kind: each + averages[kind] / self._count
                for kind, each in usual(_SENT, " bytes").items()
            },
            "passes": _passes(self._steps[-1]),
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


def _passes(step: _Step) -> list[dict[str, Any]]:
    """The passes of a stage's step, as the fields of `MeasuredPass`; it waits before each."""
    first, found = step.readings[0], []
    for before, after in zip(step.readings, step.readings[1:], strict=False):
        if after.passed is not None:
            kind, number = after.passed
            begin_s = before.now_s + after.wait_s - before.wait_s
            found.append(
                {
                    "kind": kind,
                    "micro_batch": number,
                    "begin_s": min(begin_s, after.now_s) - first.now_s,
                    "end_s": after.now_s - first.now_s,
                }
            )
    return found


def _usual(values: list[float]) -> float:
    """The median; the mean of what is done in fewer than half of the steps."""
    return statistics.median(values) or statistics.fmean(values)
