"""Simulates the memory of a step in which some modules' forward passes are done again.

A module that is recomputed keeps its arguments only, as do several that are recomputed together
(`recompute_names`). When the backward pass first needs something
that its forward pass made, this runs again, until the last such storage exists; each storage is
then freed as soon as the backward pass has read it. So `torch.utils.checkpoint` does it with
`use_reentrant=False`. Arithmetic on lifetimes; loads no torch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trainwright.estimator.lifetimes import ModuleCall
from trainwright.estimator.memory.recompute_names import ends_of
from trainwright.estimator.memory.workspace import operation_workspace_bytes
from trainwright.estimator.structure import RecordedStep

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NEVER = 1 << 60
# The order at a place, before the place's own event, 0: what is freed; what is recomputed; copies
# that are freed.
_FREED, _RECOMPUTED, _COPY_FREED = -(1 << 41), -(1 << 40), -1


@dataclass(frozen=True)
class LiveBytes:
    """Bytes alive during a step, after each of its events. Arrays of one length.

    An event that recomputing adds has the place before which it happens.
    """

    places: NDArray[Any]
    live_bytes: NDArray[Any]
    settled: NDArray[Any]
    """without the workspace of an operation, which is freed at once"""

    @property
    def peak_bytes(self) -> float:
        """The most bytes alive at once."""
        return float(self.live_bytes.max(initial=0.0))

    def at(self, places: NDArray[Any]) -> NDArray[Any]:
        """The bytes alive after all events of each place."""
        return self.settled[self.places.searchsorted(places, "right") - 1]

    def most_between(self, cuts: NDArray[Any]) -> NDArray[Any]:
        """The most bytes alive from each of these increasing places to the next one."""
        import numpy as np

        begins = self.places.searchsorted(cuts, "left")
        found = np.maximum.reduceat(self.live_bytes, np.minimum(begins, len(self.places) - 1))
        return np.asarray(found)


class StorageEvents(NamedTuple):
    """What a step makes and frees. Arrays of one length."""

    places: NDArray[Any]
    numbers: NDArray[Any]
    """of storages; -1: a workspace, or of a forward pass that is done again"""
    sizes: NDArray[Any]
    """bytes"""
    signs: NDArray[Any]
    """1: made; -1: freed; 0: a workspace, which is freed at once"""


class _EventOrder(NamedTuple):
    """`StorageEvents` at any batch size: with codes instead of bytes."""

    places: NDArray[Any]
    numbers: NDArray[Any]
    codes: NDArray[Any]
    signs: NDArray[Any]


class Region(NamedTuple):
    """What is recomputed together: a call of a module, or several that follow each other."""

    call: ModuleCall
    """of all of them"""
    members: range
    """the indices of the calls in it"""


class StepSimulation:
    """A recorded step at a batch size."""

    def __init__(self, step: RecordedStep, batch_size: int) -> None:
        import numpy as np

        self.lifetimes = lives = step.lifetimes
        self._step = step
        self._bytes_of = _bytes_of(step, batch_size)
        self._numbers, self._codes, self._signs = lives.events()
        self._first = len(lives.start)
        made = self._signs > 0
        self._births = np.flatnonzero(made)
        self._deaths = np.full(len(self._births), _NEVER)
        ended = np.flatnonzero(self._signs < 0)
        self._deaths[self._numbers[ended]] = ended
        self._kept = {one.number: one for one in lives.kept}
        self._kept_by: dict[int, list[int]] = {}
        """by call: the storages that are kept for it"""
        for one in lives.kept:
            for saver, _ in one.saves:
                self._kept_by.setdefault(saver, []).append(one.number)
        self._regions: dict[str, list[Region]] = {}
        self._orders: dict[frozenset[str], _EventOrder] = {}

    def at(self, batch_size: int) -> StepSimulation:
        """The same step at another batch size; what does not depend on it is computed once."""
        found = copy.copy(self)
        found._bytes_of = _bytes_of(self._step, batch_size)
        return found

    def live_bytes(self, recomputed: Collection[str] = ()) -> LiveBytes:
        """The bytes alive if these modules are recomputed.

        A module inside another one of them is recomputed with it.
        """
        import numpy as np

        found = self.events(recomputed)
        settled = np.cumsum(found.sizes * found.signs)
        live = settled + np.where(found.signs == 0, found.sizes, 0.0)
        shown = found.places >= self._first
        return LiveBytes(found.places[shown], live[shown], settled[shown])

    def events(self, recomputed: Collection[str] = ()) -> StorageEvents:
        """What is made and freed if these modules are recomputed, in order."""
        key = frozenset(recomputed)
        if key not in self._orders:
            self._orders[key] = self._order(key)
        places, numbers, codes, signs = self._orders[key]
        return StorageEvents(places, numbers, self._bytes_of[codes], signs)

    def _order(self, recomputed: Collection[str]) -> _EventOrder:
        import numpy as np

        changes = _Changes(self, self.outermost(recomputed))
        ends = np.arange(len(self._codes), dtype=np.int64)
        places, order = ends.copy(), np.zeros(len(ends), dtype=np.int64)
        for number, death in changes.deaths.items():
            event = self._deaths[number]
            if death != event:
                places[event], order[event] = death, _FREED
        numbers, codes, signs = self._numbers, self._codes, self._signs
        if changes.added:
            added = np.array(changes.added, dtype=np.int64)
            places = np.concatenate([places, added[:, 0]])
            order = np.concatenate([order, added[:, 1]])
            codes = np.concatenate([codes, added[:, 2]])
            signs = np.concatenate([signs, added[:, 3]])
            numbers = np.concatenate([numbers, np.full(len(added), -1, dtype=np.int64)])
        by_time = np.lexsort((order, places))
        return _EventOrder(
            places[by_time],
            numbers[by_time].astype(np.int32),
            codes[by_time].astype(np.int32),
            signs[by_time].astype(np.int8),
        )

    def peak_bytes(self, recomputed: Collection[str] = ()) -> float:
        """The most bytes alive at once if these modules are recomputed."""
        return self.live_bytes(recomputed).peak_bytes

    def kept_bytes(self, recomputed: Collection[str] = ()) -> float:
        """The bytes alive between the step's first forward pass and its backward pass."""
        import numpy as np

        graphs = self.lifetimes.graphs or ()
        middles = [middle for begin, middle, _ in graphs if begin >= self._first]
        middle = min(middles, default=len(self._codes))
        return float(self.live_bytes(recomputed).at(np.array([middle - 1]))[0])

    def bytes_of(self, number: int) -> float:
        """The size of a storage."""
        return float(self._bytes_of[self._codes[self._births[number]]])

    def lifetime(self, number: int) -> tuple[int, int]:
        """The places where a storage is made and freed; the second is huge if it is never freed."""
        return int(self._births[number]), int(self._deaths[number])

    @property
    def births(self) -> NDArray[Any]:
        """The places where storages are made, by number."""
        return self._births

    @property
    def step_places(self) -> tuple[int, int]:
        """The first place of the step, and the place after its last."""
        return self._first, len(self._codes)

    def spans(self, name: str) -> list[tuple[int, int]]:
        """The places [begin, end) of the forward and backward passes of what has this name."""
        found = []
        for call, _ in self.regions(name):
            found += [(call.begin, call.end), (call.backward, call.done + 1)]
        return found

    def regions(self, name: str) -> list[Region]:
        """What has this name, once for each time that it runs."""
        if name not in self._regions:
            self._regions[name] = list(self._found(*ends_of(name)))
        return self._regions[name]

    def _found(self, first: str, last: str) -> Iterator[Region]:
        calls = self.lifetimes.calls
        for begin, call in enumerate(calls):
            if call.name != first:
                continue
            if first == last:
                yield Region(call, range(begin, self._end(begin)))
                continue
            at = self._end(begin)
            while at < len(calls) and calls[at].parent == call.parent:
                ending = self._end(at)
                if calls[at].name == last:
                    yield self._joined(range(begin, ending))
                    break
                at = ending

    def _end(self, place: int) -> int:
        """The index behind a call and all calls in it."""
        calls = self.lifetimes.calls
        ends = calls[place].end
        found = place + 1
        while found < len(calls) and calls[found].begin < ends:
            found += 1
        return found

    def _joined(self, members: range) -> Region:
        """Calls that follow each other as one."""
        calls = [self.lifetimes.calls[place] for place in members]
        first = calls[0]
        end = max(one.end for one in calls)
        given = {
            one
            for call in calls
            if call.parent == first.parent
            for one in call.given
            if self._births[one] < first.begin
        }
        stop, done = max(one.stop for one in calls), max(one.done for one in calls)
        low, high = self._births.searchsorted([first.begin, end])
        for number in range(low, high):
            kept = self._kept.get(number)
            if kept is not None and kept.read <= end:
                stop = max(stop, int(self._births[number]) + 1)
                done = max(done, *(at for _, at in kept.saves))
        backward = min(one.backward for one in calls)
        call = ModuleCall(
            first.name, first.parent, first.begin, end, stop, backward, done, tuple(sorted(given))
        )
        return Region(call, members)

    def in_order(self, names: Collection[str]) -> tuple[str, ...]:
        """The names in the order in which they first run."""
        return tuple(sorted(names, key=lambda name: self.regions(name)[0].call.begin))

    def outermost(self, names: Collection[str]) -> list[Region]:
        """The regions of these names that are not inside another one of them, in order."""
        found: list[Region] = []
        every = [one for name in names for one in self.regions(name)]
        for one in sorted(every, key=lambda one: (one.members.start, -one.members.stop)):
            if not found or one.members.start >= found[-1].members.stop:
                found.append(one)
        return found


def _bytes_of(step: RecordedStep, batch_size: int) -> NDArray[Any]:
    """Bytes by code; 0 for the last one."""
    import numpy as np

    workspaces = [operation_workspace_bytes(one, batch_size) for one in step.operations]
    sizes = (max(0.0, line(batch_size)) for line in step.lifetimes.sizes)
    return np.array([*sizes, *workspaces, 0.0])


class _Changes:
    """What recomputing some calls changes: when storages are freed, and the events it adds."""

    def __init__(self, step: StepSimulation, chosen: Sequence[Region]) -> None:
        self._step, self._chosen = step, chosen
        self.deaths: dict[int, int] = {}
        """by storage: the place at which it is freed instead"""
        self.added: list[tuple[int, int, int, int]] = []
        """events: place, order at that place, code, sign"""
        self._by_call = {
            call: place for place, region in enumerate(chosen) for call in region.members
        }
        """by recomputed call: the region that contains it"""
        self._holders: dict[int, int] = {}
        """by storage: where the last region has ended that has it as an argument"""
        for call, _ in chosen:
            for number in call.given:
                self._holders[number] = max(self._holders.get(number, -1), call.done)
        copies = self._free_early()
        for place, (call, _) in enumerate(chosen):
            self._recompute(call, copies.get(place, {}))

    def _free_early(self) -> dict[int, dict[int, int]]:
        """Set when storages are freed that regions kept.

        Returns by region, by storage: where the copy that it makes again is freed.
        """
        step, copies = self._step, dict[int, dict[int, int]]()
        inside = {
            number: place
            for place, (call, _) in enumerate(self._chosen)
            for number in range(*self._made_in(call))
        }
        # A storage that no region makes, keeps or is given is freed as without recomputation.
        saved = {one for call in self._by_call for one in step._kept_by.get(call, ())}
        for number in {*inside, *saved, *self._holders}:
            birth, death = int(step._births[number]), int(step._deaths[number])
            if not self._is_kept(birth, death):
                if death < (held := self._holders.get(number, -1)):
                    self.deaths[number] = held
                continue
            region = inside.get(number, -1)
            kept = step._kept.get(number)
            until = self._until(number, region, birth, death)
            own = until.pop(region, None) if region >= 0 else None
            others = until.pop(-1)
            held = max(others, self._holders.get(number, -1), birth if kept is None else kept.read)
            if own is not None:
                copies.setdefault(region, {})[number] = own
            if held < death:
                self.deaths[number] = held
        return copies

    def _until(self, number: int, region: int, birth: int, death: int) -> dict[int, int]:
        """By region that saves a storage (-1: what is in none): where it is read last."""
        kept = self._step._kept.get(number)
        if kept is None:
            return {-1: -1, region: death}
        last = max(at for _, at in kept.saves)
        # All that reads it, and so all that saves it, is in the region.
        within = region >= 0 and kept.read <= self._chosen[region].call.end
        until = {-1: -1}
        for saver, at in kept.saves:
            outer = region if within else self._by_call.get(saver, -1)
            until[outer] = max(until.get(outer, -1), death if at == last else at)
        return until

    def _made_in(self, call: ModuleCall) -> tuple[int, int]:
        """The first and the end of the numbers of the storages that a call makes."""
        import numpy as np

        births = self._step._births
        return int(np.searchsorted(births, call.begin)), int(np.searchsorted(births, call.end))

    def _is_kept(self, birth: int, death: int) -> bool:
        """Whether a storage is made by a forward pass and freed by its backward pass."""
        for begin, middle, end in self._step.lifetimes.graphs or ():
            if begin <= birth < middle:
                return middle <= death < end
        return False

    def _recompute(self, call: ModuleCall, copies: dict[int, int]) -> None:
        """Add the events of a second forward pass, which makes these copies."""
        step = self._step
        at, order = call.backward, _RECOMPUTED
        alive: dict[int, int] = {}
        left = {}
        for number in range(*self._made_in(call)):
            if number not in copies and step._deaths[number] >= call.end:
                kept = step._kept.get(number)
                left[number] = kept.read if kept is not None else call.stop
        leaves: dict[int, list[int]] = {}
        for number, place in left.items():
            leaves.setdefault(place, []).append(number)
        for place in range(call.begin, call.stop):
            code, sign, number = (
                int(step._codes[place]),
                int(step._signs[place]),
                int(step._numbers[place]),
            )
            for one in leaves.get(place, ()):
                if one in alive:
                    self.added.append((at, order, alive.pop(one), -1))
                    order += 1
            if sign < 0 and number not in alive:
                continue  # it is not of this pass
            self.added.append((at, order, code, sign))
            order += 1
            if sign > 0:
                alive[number] = code
            elif sign < 0:
                del alive[number]
        for number, code in alive.items():
            if number in copies:
                self.added.append((max(at, copies[number]), _COPY_FREED, code, -1))
            else:
                self.added.append((at, order, code, -1))
                order += 1
