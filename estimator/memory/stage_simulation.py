"""Simulates the memory of a stage of a pipeline: some units of a model, pass by pass.

The recorded step of the whole model (`recomputation`) is divided at the places where units begin in
its forward and backward pass. A stage's pass over a micro-batch then has the events of its part:

    forward            what it makes, and what of that stays for its backward pass
    backward           gradients of its inputs and parameters; what stayed is freed
    input-gradient     as backward, but of products whose weight gradients come later, the inputs
                       and the gradients of outputs stay
    weight-gradient    these weight gradients of a micro-batch, all at once

What came from the stage before stays until the backward pass has ended, as does what was sent.
Later micro-batches add to the gradients of the first one. Arithmetic; loads no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.estimator.lifetimes import ModuleCall
from trainwright.estimator.memory.recomputation import StepSimulation
from trainwright.estimator.structure import RecordedStep, Unit

if TYPE_CHECKING:
    from numpy.typing import NDArray

CUDA_BLOCK_BYTES = 512
"""torch's CUDA allocator gives multiples of this (c10/cuda/CUDACachingAllocator.cpp)."""
_NEVER = 1 << 60


@dataclass(frozen=True)
class PassMemory:
    """Bytes that a micro-batch takes in the passes of a stage, beyond the stage's state."""

    received: float
    """from the stage before"""
    returned: float
    """gradients from the stage after"""
    forward_peak: float
    kept: float
    """made in the forward pass and alive after it"""
    backward_peaks: tuple[float, float]
    """of the first micro-batch, and of one that adds to its gradients; what was kept counts"""
    gradients: float
    """of parameters, made in the first backward pass and alive after it"""
    later_kept: float
    """kept after the backward pass for weight gradients that come later"""
    later_gradients: float
    later_workspace: float


class StageSimulation:
    """Stages of a recorded step, for micro-batches of some samples."""

    def __init__(
        self, step: RecordedStep, units: Sequence[Unit], samples: int, block_bytes: int = 1
    ) -> None:
        """`block_bytes`: the allocator gives multiples of it."""
        self._simulation = StepSimulation(step, samples)
        self._lives, self._block_bytes = step.lifetimes, block_bytes
        self._crossing = [0.0, *(one.crossing_bytes(samples) for one in units)]
        self._crossing[-1] = 0.0
        self._forward, self._backward = self._places_of(units)
        self._kept = {one.number: one for one in self._lives.kept}

    def _places_of(self, units: Sequence[Unit]) -> tuple[list[int], list[int]]:
        """Where the forward pass of each unit begins, and its backward pass ends.

        Both have one more place, where the forward pass ends and the backward pass begins.
        """
        first = self._simulation.step_places[0]
        graphs = [one for one in self._lives.graphs or () if one[0] >= first]
        begin, middle, end = graphs[0] if graphs else (first, *self._simulation.step_places[1:] * 2)
        begins = dict[str, int]()
        for call in self._lives.calls:
            begins.setdefault(call.name, call.begin)
        forward, backward = [middle], [middle]
        for unit in reversed(units[1:]):
            place = begins.get(unit.name, forward[-1])
            forward.append(min(place, forward[-1]))
            backward.append(max(backward[-1], 1 + self._read_last(forward[-1])))
        forward.append(begin)
        backward.append(end)
        return forward[::-1], [min(one, end) for one in backward[::-1]]

    def _read_last(self, begin: int) -> int:
        """The last place at which the backward pass reads what was made from a place on."""
        found = [call.done for call in self._lives.calls if call.begin >= begin]
        low = int(self._simulation.births.searchsorted(begin))
        found += [at for one in self._lives.kept if one.number >= low for _, at in one.saves]
        return max(found, default=-1)

    def batch_bytes(self, samples: int) -> float:
        """The bytes of a batch of so many samples."""
        sizes = self._lives.sizes
        ended = {-1 - code for code in (*self._lives.start, *self._lives.step) if code < 0}
        made = [code for code in self._lives.start if code >= 0]
        return sum(
            sizes[code].per_sample * samples
            for number, code in enumerate(made)
            if number not in ended and sizes[code].per_sample > 0
        )

    def update_bytes(self) -> float:
        """What the optimizer needs beside all that is alive before it."""
        live = self._simulation.live_bytes()
        begin, end = self._backward[0], self._simulation.step_places[1]
        if begin >= end:
            return 0.0
        after = live.live_bytes[live.places >= begin]
        before = live.settled[live.places < begin]
        return max(0.0, float(after.max()) - float(before[-1])) if len(before) else 0.0

    def passes(
        self,
        first: int,
        end: int,
        recomputed: Collection[str] = (),
        later: Mapping[str, float] | None = None,
    ) -> PassMemory:
        """The memory of a stage with the units [first, end).

        `later`: products whose weight gradients come later, with the bytes of their outputs.
        """
        import numpy as np

        events = self._simulation.events(recomputed)
        made, freed = _places_by_number(events.numbers, events.places, events.signs)
        freed, held = self._without_outputs(made, freed), freed
        sizes = np.ceil(events.sizes / self._block_bytes) * self._block_bytes
        size_of = np.zeros(len(made))
        size_of[events.numbers[events.signs > 0]] = sizes[events.signs > 0]
        begin, middle = self._forward[first], self._forward[end]
        back, done = self._backward[end], self._backward[first]
        here = (made >= begin) & (made < middle)
        back_here = (made >= back) & (made < done)
        gradient = back_here & (freed >= self._backward[0])
        calls = [
            (number, call)
            for number, call in enumerate(self._lives.calls)
            if begin <= call.begin < middle and call.name in (later or {})
        ]
        saved, late = self._saved_by(calls, len(made)), np.zeros(len(made), dtype=bool)
        for _, call in calls:
            late |= gradient & (made >= call.backward) & (made <= call.done + 1)
        crosses = here & ((freed >= middle) & (freed < back) | (freed >= done))
        for number, kept in self._kept.items():
            crosses[number] |= here[number] and kept.read >= middle

        workspaces = [
            float(sizes[(events.signs == 0) & self._within(events.places, call)].max(initial=0.0))
            for _, call in calls
        ]

        def part(low: int, high: int, own: NDArray[Any]) -> tuple[Any, Any, Any, Any]:
            inside = (events.places >= low) & (events.places < high)
            inside &= (events.numbers < 0) | own[events.numbers]
            shown = np.flatnonzero(inside)
            return (
                events.places[shown],
                sizes[shown],
                events.signs[shown],
                events.numbers[shown],
            )

        _, parts, signs, _ = part(begin, middle, here)
        forward_peak, kept_bytes = _run(0.0, parts, signs)
        dropped = here & (freed == middle)
        kept_bytes -= float(size_of[dropped].sum())
        places, parts, signs, numbers = part(back, done, here | back_here)
        stay = crosses | (here & saved)
        stay |= dropped
        left_out = (numbers >= 0) & (np.where(signs < 0, stay[numbers], late[numbers]))
        parts = np.where(left_out, 0.0, parts)
        outputs = sum((later or {})[call.name] for _, call in calls)
        more = [(call.done, (later or {})[call.name], 1) for _, call in calls]
        let_go = here & (freed != held) & (freed >= back) & (freed < done) & ~stay
        more += [(int(freed[one]), float(size_of[one]), -1) for one in np.flatnonzero(let_go)]
        more.sort()
        at = np.searchsorted(places, [place for place, _, _ in more], "right")
        parts = np.insert(parts, at, [size for _, size, _ in more])
        signs = np.insert(signs, at, [sign for _, _, sign in more])
        numbers = np.insert(numbers, at, -1)
        adds = (numbers >= 0) & gradient[numbers] & (signs > 0)
        first_peak, _ = _run(kept_bytes, parts, signs)
        other_peak, _ = _run(kept_bytes, parts, np.where(adds, 0, signs))
        from_before = bool((saved & (made < begin)).any())
        return PassMemory(
            received=self._crossing[first],
            returned=self._crossing[end],
            forward_peak=forward_peak,
            kept=kept_bytes,
            backward_peaks=(first_peak, other_peak),
            gradients=float(size_of[gradient & ~late].sum()),
            later_kept=outputs
            + float(size_of[here & saved].sum())
            + (self._crossing[first] if from_before else 0.0),
            later_gradients=float(size_of[late].sum()),
            later_workspace=max(workspaces, default=0.0),
        )

    def _without_outputs(self, made: NDArray[Any], freed: NDArray[Any]) -> NDArray[Any]:
        """Where storages are freed if nobody holds the model's outputs: after the forward pass.

        The recorded step holds them until it ends.
        """
        import numpy as np

        begin, middle, end = self._forward[0], self._forward[-1], self._backward[0]
        held = (made >= begin) & (made < middle) & (freed >= end) & (freed < _NEVER)
        for number in np.flatnonzero(held).tolist():
            kept = self._kept.get(number)
            last = middle if kept is None else max(at for _, at in kept.saves) + 1
            freed[number] = last if last < end else freed[number]
        return freed

    @staticmethod
    def _within(places: NDArray[Any], call: ModuleCall) -> NDArray[Any]:
        return (places >= call.backward) & (places <= call.done + 1)

    def _saved_by(self, calls: Iterable[tuple[int, ModuleCall]], count: int) -> NDArray[Any]:
        """Whether each storage is kept for one of these calls."""
        import numpy as np

        own, found = {number for number, _ in calls}, np.zeros(count, dtype=bool)
        for number, kept in self._kept.items():
            found[number] = any(call in own for call, _ in kept.saves)
        return found


def _places_by_number(
    numbers: NDArray[Any], places: NDArray[Any], signs: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Where each storage is made and freed; the second is huge if it is never freed."""
    import numpy as np

    count = int(numbers.max(initial=-1)) + 1
    made, freed = np.full(count, -1), np.full(count, _NEVER)
    known = numbers >= 0
    made[numbers[known & (signs > 0)]] = places[known & (signs > 0)]
    freed[numbers[known & (signs < 0)]] = places[known & (signs < 0)]
    return made, freed


def _run(before: float, sizes: NDArray[Any], signs: NDArray[Any]) -> tuple[float, float]:
    """The most bytes alive during some events, and those after them."""
    import numpy as np

    if not len(sizes):
        return before, before
    settled = before + np.cumsum(sizes * signs)
    live = settled + np.where(signs == 0, sizes, 0.0)
    return max(before, float(live.max())), float(settled[-1])


def peak_bytes(
    passes: Iterable[tuple[str, int]],
    micro_batches: Sequence[PassMemory],
    *,
    state_bytes: float,
    update_bytes: float,
    in_host: bool,
) -> float:
    """The most bytes of a stage in a step, whose passes are pairs of kind and micro-batch.

    `micro_batches` are of these numbers. `state_bytes`: what lives all the time, `update_bytes`:
    what the optimizer needs. `in_host`: whether the device's memory is the host's, which also holds
    the message for the next pass, which comes while a pass computes.
    """
    level, gradients, peak = state_bytes, 0.0, state_bytes
    order = list(passes)
    forwards = [number for kind, number in order if kind == "forward"]
    begun, has_gradients, has_late = 0, False, False
    for kind, number in order:
        one = micro_batches[number]
        following = 0.0
        if in_host and begun < len(forwards) - (kind == "forward"):
            at = begun + (kind == "forward")
            following = micro_batches[forwards[at]].received
        if kind == "forward":
            begun += 1
            peak = max(peak, level + one.received + one.forward_peak + following)
            level += one.received + one.kept
        elif kind == "weight-gradient":
            most = one.later_gradients + one.later_workspace
            peak = max(peak, level + most + following)
            level -= one.later_kept
            level += 0.0 if has_late else one.later_gradients
            gradients += 0.0 if has_late else one.later_gradients
            has_late = True
        else:
            most = one.backward_peaks[has_gradients]
            peak = max(peak, level - one.kept + most + one.returned + following)
            level -= one.received + one.kept
            if kind == "input-gradient":
                level += one.later_kept
            level += 0.0 if has_gradients else one.gradients
            gradients += 0.0 if has_gradients else one.gradients
            has_gradients = True
    summed = 0.0 if in_host else gradients  # in host memory, sums replace gradients
    return max(peak, state_bytes + summed + update_bytes)
