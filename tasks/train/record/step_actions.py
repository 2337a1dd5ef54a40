"""Measures what a rank does in its steps, by kind of action.

The rank says what it has done since it said so last. On the host, that is the time in between,
without waits for other ranks. A CUDA device works while the host goes on, so there the time is that
between two events on the device.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, get_args

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.runs.artefacts.step_kinds import ComputeKind, SentKind, WaitKind
from trainwright.tasks.train.exchange.collective import Collective

MOST_STEPS = 512
_COMPUTE, _WAIT, _SENT = get_args(ComputeKind), get_args(WaitKind), get_args(SentKind)


class StepActions:
    """Seconds and bytes of a rank's latest steps.

    Each step calls `begin`, `done` for each thing, and `end`, which a step that is not whole omits.
    """

    def __init__(self, exchange: Collective, device: torch.device) -> None:
        self._exchange, self._on_gpu = exchange, device.type == "cuda"
        self._steps: deque[dict[str, float]] = deque(maxlen=MOST_STEPS)
        self._seconds = dict.fromkeys((*_COMPUTE, *_WAIT), 0.0)
        self._at = self._read()
        self._bytes = self._sent()
        self._events: list[tuple[str | None, float, Any]] = []
        """on a CUDA device: what was done up to each event, and the seconds of waiting in it"""

    def _read(self) -> tuple[float, float]:
        return time.perf_counter(), self._exchange.wait_s

    def _sent(self) -> tuple[float, float]:
        """The bytes of sums and of transfers so far. A plain `Collective` counts none."""
        summed, sent = (getattr(self._exchange, one, 0) for one in ("summed_bytes", "sent_bytes"))
        return float(summed), float(sent)

    def begin(self) -> None:
        """A step begins."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._bytes = self._sent()
        self._events.clear()
        self.done(None)

    def done(self, compute: ComputeKind | None, waited: WaitKind = "agree") -> None:
        """What the rank has computed and waited for since the last call; None: the loop's work."""
        (now, wait_s), (before, waited_s) = self._read(), self._at
        self._at, wait_s = (now, wait_s), wait_s - waited_s
        self._seconds[waited] += wait_s
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((compute, wait_s, event))
        elif compute is not None:
            self._seconds[compute] += now - before - wait_s

    def end(self, own_s: float) -> None:
        """The step has ended, and took the rank so many seconds without waiting."""
        if self._events:
            self._events[-1][2].synchronize()
        for (_, _, begun), (compute, wait_s, event) in zip(
            self._events, self._events[1:], strict=False
        ):
            if compute is not None:
                elapsed_s = begun.elapsed_time(event) / 1e3
                self._seconds[compute] += max(0.0, elapsed_s - wait_s)
        found = dict(self._seconds)
        found["loop"] = max(0.0, own_s - sum(found[kind] for kind in _COMPUTE))
        for kind, now, before in zip(_SENT, self._sent(), self._bytes, strict=True):
            found[f"{kind} bytes"] = now - before
        self._steps.append(found)

    def summary(self) -> dict[str, dict[str, float]] | None:
        """The usual step of the latest ones, as the fields of `StepByKind`; None without steps."""
        if not self._steps:
            return None

        def usual(names: Iterable[str], end: str = "") -> dict[str, float]:
            return {name: _usual([one[name + end] for one in self._steps]) for name in names}

        return {
            "compute_s": usual(_COMPUTE),
            "wait_s": usual(_WAIT),
            "sent_bytes": usual(_SENT, " bytes"),
        }


def _usual(values: list[float]) -> float:
    """The median; the mean of what is done in fewer than half of the steps, such as averages."""
    return statistics.median(values) or statistics.fmean(values)
