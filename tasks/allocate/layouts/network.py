"""The time of a transfer between ranks on some machines.

A message of m bytes takes α + m / β. A sum is a ring over all ranks (`communication.all_reduce`).
In other transfers every rank sends to every other at once: each machine's link carries what its
ranks send to other machines, in both directions at once, and the memory of a machine carries what
its ranks send to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.estimator.predict.communication import Link, all_reduce
from trainwright.tasks.allocate.layouts.transfer_sizes import Moved
from trainwright.tasks.allocate.plan.topology import machine_of
from trainwright.tasks.runs.artefacts.plan import MachineLinks
from trainwright.tasks.spec.pool import Device


@dataclass(frozen=True)
class RankNetwork:
    """The links of some ranks.

    By machine: `between` is its link to the others, `inside` that between its own ranks.
    """

    machines: tuple[str, ...]
    """by rank"""
    between: Mapping[str, Link]
    inside: Mapping[str, Link]

    @classmethod
    def of(cls, devices: Sequence[Device], links: Mapping[str, MachineLinks]) -> RankNetwork:
        """The network of the ranks on some devices; `links` are by machine."""
        return cls(
            tuple(machine_of(device) for device in devices),
            {name: one.between for name, one in links.items()},
            {name: one.inside for name, one in links.items()},
        )

    def seconds(self, moved: Moved) -> float:
        """The time of one transfer."""
        ranks = len(self.machines)
        if ranks == 1:
            return 0.0
        if moved.pairs is None:
            return max(all_reduce(link, moved.ring_bytes, ranks).median for link in self._used())
        return self._pairs(moved)

    def _used(self) -> list[Link]:
        """The links that a ring over all ranks crosses."""
        counts = Counter(self.machines)
        crossed = [self.between[name] for name in counts] if len(counts) > 1 else []
        return [*crossed, *(self.inside[name] for name, count in counts.items() if count > 1)]

    def _pairs(self, moved: Moved) -> float:
        import numpy as np

        found = 0.0
        here = np.array(self.machines)
        for name in sorted(set(self.machines)):
            mine = here == name
            within = moved.pairs[np.ix_(mine, mine)].sum()
            if mine.sum() > 1:
                found = max(found, self.inside[name].time(mine.sum() - 1, within).median)
            if mine.all():
                continue
            out = moved.pairs[np.ix_(mine, ~mine)].sum()
            into = moved.pairs[np.ix_(~mine, mine)].sum()
            messages = float((~mine).sum())
            found = max(found, self.between[name].time(messages, max(out, into)).median)
        return found
