"""The time of a transfer between ranks on some machines.

A message of m bytes takes α + m / β. A sum is a ring over all ranks (`communication.all_reduce`).
In other transfers every rank sends to every other at once: each machine's link carries what its
ranks send to other machines, in both directions at once, and the memory of a machine carries what
its ranks send to each other.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.estimator.predict.communication import Link, all_reduce
from trainwright.tasks.allocate.actions.transfer_sizes import Moved
from trainwright.tasks.allocate.plan.topology import machine_of
from trainwright.tasks.runs.artefacts.plan import MachineLinks
from trainwright.tasks.spec.pool import Device


@dataclass(frozen=True)
class RankNetwork:
    """The links of some ranks.

    By machine: `between` is its link to the others, `inside` that between its own ranks, and `sums`
    that for sums among its own ranks if it is another one.
    """

    machines: tuple[str, ...]
    """by rank"""
    between: Mapping[str, Link]
    inside: Mapping[str, Link]
    sums: Mapping[str, Link] = field(default_factory=dict)

    @classmethod
    def of(cls, devices: Sequence[Device], links: Mapping[str, MachineLinks]) -> RankNetwork:
        """The network of the ranks on some devices; `links` are by machine."""
        return cls(
            tuple(machine_of(device) for device in devices),
            {name: one.between for name, one in links.items()},
            {name: one.inside for name, one in links.items()},
            {name: one.sums for name, one in links.items() if one.sums is not None},
        )

    def among(self, ranks: Sequence[int]) -> RankNetwork:
        """The network of some of the ranks."""
        key = tuple(ranks)
        if key == tuple(range(len(self.machines))):
            return self
        if key not in self._parts:
            machines = tuple(self.machines[rank] for rank in key)
            self._parts[key] = RankNetwork(machines, self.between, self.inside, self.sums)
        return self._parts[key]

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, ...], RankNetwork]:
        return {}

    def seconds(self, moved: Moved) -> float:
        """The time of one transfer among all ranks."""
        ranks = len(self.machines)
        if ranks == 1:
            return 0.0
        if moved.pairs is None:
            return max(all_reduce(link, moved.ring_bytes, ranks).median for link in self._crossed)
        return self._pairs(moved)

    @functools.cached_property
    def _crossed(self) -> list[Link]:
        """The links that a ring over all ranks crosses, alike ones once."""
        counts = Counter(self.machines)
        between = [self.between[name] for name in counts] if len(counts) > 1 else []
        own = {**self.inside, **self.sums}
        inside = [own[name] for name, count in counts.items() if count > 1]
        return list({repr(link): link for link in (*between, *inside)}.values())

    def _pairs(self, moved: Moved) -> float:
        import numpy as np

        here, latency_s, seconds_per_byte = self._by_machine
        ranks, count = here.sum(axis=1), len(here)
        sent = here @ moved.pairs @ here.T
        """bytes from each machine to each, itself included"""
        within = np.diag(sent)
        crossing = np.maximum(sent.sum(axis=1), sent.sum(axis=0)) - within
        # As `Link.time`: inside a machine, and between it and the others.
        inside = (ranks - 1) * latency_s[0] + within * seconds_per_byte[0]
        outside = (len(self.machines) - ranks) * latency_s[1] + crossing * seconds_per_byte[1]
        return float(max(inside[ranks > 1].max(initial=0.0), outside.max() if count > 1 else 0.0))

    def arrivals(self, moved: Moved, begins: Any, free: Any) -> tuple[Any, Any]:
        """When each rank has sent its part, and when it has those of the others: arrays over ranks.

        Ranks send when they are ready, `begins`, and a machine when all its ranks are. `free`: when
        the last part of earlier transfers arrives at a rank.
        """
        import numpy as np

        here, latency_s, seconds_per_byte = self._by_machine
        ranks, count = here.sum(axis=1), len(here)
        starts = np.where(here > 0, begins, -np.inf).max(axis=1)
        sent = here @ moved.pairs @ here.T
        within = np.diag(sent)
        inside = (ranks - 1) * latency_s[0] + within * seconds_per_byte[0]
        left = arrived = starts + np.where(ranks > 1, inside, 0.0)
        if count > 1:
            messages_s = (len(self.machines) - ranks) * latency_s[1]
            leaving = starts + messages_s + (sent.sum(axis=1) - within) * seconds_per_byte[1]
            entering_s = messages_s + (sent.sum(axis=0) - within) * seconds_per_byte[1]
            open_s = np.where(here > 0, free, -np.inf).max(axis=1)
            entered = np.maximum(_without_own(starts, np.min), open_s) + entering_s
            left = np.maximum(left, leaving)
            arrived = np.maximum(arrived, np.maximum(_without_own(leaving, np.max), entered))
        return left @ here, arrived @ here

    @functools.cached_property
    def _by_machine(self) -> tuple[Any, Any, Any]:
        """Which ranks each machine has, and the links inside (row 0) and between machines (row 1).

        numpy arrays: (machines, ranks) of 0 and 1; latency and seconds for a byte, (2, machines).
        """
        import numpy as np

        names = sorted(set(self.machines))
        ranks = np.array(self.machines)
        links = [[kind[name] for name in names] for kind in (self.inside, self.between)]
        return (
            np.array([ranks == name for name in names], dtype=float),
            np.array([[link.latency_s for link in some] for some in links]),
            np.array([[1 / link.bandwidth_bytes_per_s for link in some] for some in links]),
        )


def _without_own(values: Any, extreme: Any) -> Any:
    """For each entry, the extreme (`np.min` or `np.max`) of the others."""
    import numpy as np

    found = extreme(values)
    own = int(np.argmax(values == found))
    others = np.full(len(values), found)
    others[own] = extreme(np.delete(values, own))
    return others
