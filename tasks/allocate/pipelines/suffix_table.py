"""The best division of each rest of a chain among each set of devices: dynamic programming.

With t_s the mean seconds of stage s for a micro-batch, f_s those of its forward pass, c_s those of
a message over the cut behind it, and M micro-batches, no step whose backward passes are not split
is shorter than

    max over s of  Σ_{u < s} (t_u + 2 c_u) + M · t_s + w_s        w_s = q_s − (k_s − 1) · f_s >= 0

since stage s waits for the first micro-batch to come, and those before it for its last gradient.
q_s is the least time in which a micro-batch passes the units behind stage s and comes back; while
the first one does, the stage can only compute the forward passes of k_s − 1 others. With `gpipe`,
w_s = q_s: all forward passes come first. If backward passes are split, the weight gradients of the
last micro-batch may come at the end: then t_u + 2 c_u is f_u + c_u, and q_s has no weight
gradients. What passes take beside layers (`StageCost`) is in t_s and in the f_u of what a
micro-batch adds at its least, one message for a pass, and in the f_s of w_s at its most. Backward
from the end of the chain this is

    U(i, D, d) = min over j of  max(M · t_d(i, j) + w_d(i, j), a_d(i, j) + R(j, D − d, d))
    R(j, D, d) = min over e in D of  a_de(j) + U(j, D, e)

for the units from i on, the devices D, and d as the first of them; a is what one micro-batch adds.
Devices that are alike are counted, so that D is a number of each kind. The least U over all D and d
is a lower bound of every division's step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainwright.tasks.allocate.actions.schedules import in_flight
from trainwright.tasks.allocate.pipelines.stage_chain import StageChain
from trainwright.tasks.runs.artefacts.layout import StageSchedule

Counts = tuple[int, ...]
"""Devices of each kind."""


@dataclass(frozen=True)
class Kinds:
    """Kinds of devices that the table tells apart: one device stands for each, with its number."""

    shown: tuple[int, ...]
    counts: Counts
    members: tuple[tuple[int, ...], ...]


class SuffixBound:
    """The terms of the bound, for stages of units places[i] to places[j] - 1."""

    def __init__(self, chain: StageChain, schedule: StageSchedule) -> None:
        import numpy as np

        self._chain, self._schedule = chain, schedule
        self._split = schedule == "zero-bubble"
        seconds, forward = chain.mean_seconds, chain.mean(chain.forward)
        back = seconds - chain.mean(chain.weight_gradient) if self._split else seconds
        self._layers = chain.sums(chain.layers)
        self._most_bytes = 2 * float(chain.crossing_bytes.max(initial=0.0))
        self._seconds, self._forward = chain.sums(seconds), chain.sums(forward)
        self._back = np.append(np.cumsum(back.min(axis=0)[::-1])[::-1], 0.0)
        """q of the units from j on"""
        self._crossing = chain.mean_crossing_s

    def spans(self, devices: Any, places: Any, stages: int) -> tuple[Any, Any]:
        """M · t + w, and a, of a stage with this number of stages from it on (device, i, j).

        Not meaningful for j <= i.
        """
        import numpy as np

        parts, own = self._chain.micro_batches, np.asarray(devices)
        seconds, forward = (
            one[own][:, places][:, None, :] - one[own][:, places][:, :, None]
            for one in (self._seconds, self._forward)
        )
        layers = self._layers[places][None, :] - self._layers[places][:, None]
        sends = int(stages > 1)

        def longer(compute_s: Any, messages: float, moved_bytes: float, passes: int = 1) -> Any:
            return self._chain.own.longer(
                own[:, None, None],
                compute_s,
                messages=messages,
                moved_bytes=moved_bytes,
                layers=layers[None],
                passes=passes,
            )

        others = 0 if self._schedule == "gpipe" else min(parts, stages) - 1
        back = self._back[places][None, None, :]
        whole = seconds + longer(seconds, 2 * sends, 0.0, 3 if self._split else 2)
        longest = forward + longer(forward, 2, self._most_bytes) if others else forward
        wait = np.maximum(0.0, back - others * longest) if others else back
        added = forward + longer(forward, sends, 0.0) if self._split else whole
        return parts * whole + wait, added

    def messages(self, devices: Any, others: Any, places: Any) -> Any:
        """What messages between two stages add, if they are cut before units places[j]."""
        import numpy as np

        crossing = self._crossing[devices, others][:, np.maximum(places, 1) - 1]
        return (1 if self._split else 2) * crossing


@dataclass
class SuffixTable:
    """The table for one schedule; `best` and `starts` read it."""

    chain: StageChain
    kinds: Kinds
    schedule: StageSchedule
    most_stages: int
    stages: int | None = None
    """None: any number"""
    _values: dict[tuple[Counts, int], Any] = field(default_factory=dict)
    """by counts and first kind: U over i"""
    _next_cut: dict[tuple[Counts, int], Any] = field(default_factory=dict)
    """j over i; the number of units: the stage is the last"""
    _next_kind: dict[tuple[Counts, int], Any] = field(default_factory=dict)
    """by counts and kind before them: e over j"""

    def __post_init__(self) -> None:
        self._fill()

    def starts(self) -> list[tuple[float, Counts, int]]:
        """The bound of every set of devices and first kind, least first."""
        found = [
            (float(values[0]), counts, first)
            for (counts, first), values in self._values.items()
            if values[0] < float("inf") and self.stages in (None, sum(counts))
        ]
        return sorted(found)

    def kinds_and_cuts(self, counts: Counts, first: int) -> tuple[list[int], list[int]]:
        """The kinds of the stages and their cuts, by which that bound is reached."""
        order, cuts, at, left = [first], list[int](), 0, counts
        while True:
            cut = int(self._next_cut[left, order[-1]][at])
            if cut == self.chain.units:
                return order, cuts
            left = _without(left, order[-1])
            cuts.append(cut)
            order.append(int(self._next_kind[left, order[-1]][cut]))
            at = cut

    def _fill(self) -> None:
        import numpy as np

        chain, kinds = self.chain, self.kinds
        units, own = chain.units, list(kinds.shown)
        places = np.arange(units + 1)
        bound = SuffixBound(chain, self.schedule)
        rests = [
            np.stack([bound.messages([kind], [other], places)[0, :-1] for other in own])
            for kind in own
        ]
        spans: dict[int, tuple[Any, Any]] = {}
        for counts in self._in_order():
            used = sum(counts)
            if used not in spans:
                spans = {used: bound.spans(own, places, used)}
                held = [self._held(kind, used) for kind in range(len(own))]
            whole, added = spans[used]
            for kind in range(len(own)):
                if not counts[kind]:
                    continue
                work = np.where(held[kind], whole[kind, :-1], np.inf)
                left = _without(counts, kind)
                if used == 1:
                    values = work[:, units]
                    cuts = np.full(units, units, dtype=np.int16)
                else:
                    rest = self._rest(left, kind, rests[kind])
                    total = np.maximum(work, added[kind, :-1] + rest[None, :])
                    cuts = total.argmin(axis=1)
                    values = np.take_along_axis(total, cuts[:, None], axis=1)[:, 0]
                self._values[counts, kind], self._next_cut[counts, kind] = values, cuts

    def _held(self, kind: int, stages: int) -> Any:
        """Whether the first of so many stages has units i to j - 1 and can hold them (i, j)."""
        import numpy as np

        chain = self.chain
        if self.schedule == "zero-bubble" and self.stages is not None:
            stages = self.stages
        flight = in_flight(self.schedule, stages, 0, chain.micro_batches)
        sums = chain.sums(chain.state_bytes + flight * chain.kept_bytes)
        room = float(chain.room_bytes[self.kinds.shown[kind]])
        some = np.arange(chain.units + 1)[None, :] > np.arange(chain.units)[:, None]
        return some & (sums[None, :] - sums[:-1, None] <= room * (1 + 1e-9))

    def _rest(self, counts: Counts, before: int, message: Any) -> Any:
        """R over j = 0 … units; infinite at the end, as devices are left."""
        import numpy as np

        there = [kind for kind, count in enumerate(counts) if count]
        options = np.stack([message[kind] + self._values[counts, kind] for kind in there])
        best = options.argmin(axis=0)
        self._next_kind[counts, before] = np.array(there)[best]
        return np.append(np.take_along_axis(options, best[None], axis=0)[0], np.inf)

    def _in_order(self) -> Iterator[Counts]:
        """All numbers of devices, fewer first."""
        every = itertools.product(*(range(count + 1) for count in self.kinds.counts))
        most = min(self.stages or self.most_stages, self.chain.units)
        return iter(sorted((one for one in every if 0 < sum(one) <= most), key=sum))


def _without(counts: Counts, kind: int) -> Counts:
    return (*counts[:kind], counts[kind] - 1, *counts[kind + 1 :])
