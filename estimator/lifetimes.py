"""The storages of a training step: when each is made and freed, and what keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, model_validator

from trainwright.estimator.curves import Affine
from trainwright.estimator.frozen_model import FrozenModel

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ModuleCall(NamedTuple):
    """A module's forward pass in the recorded step. Places are those of `Lifetimes.graphs`."""

    name: str
    parent: int
    """the index of the call that contains it; -1: none"""
    begin: int
    end: int
    stop: int
    """before `end`: where all is made that its backward pass needs"""
    backward: int
    """where its backward pass first needs something that was kept for it"""
    done: int
    """the place after which its backward pass reads none of that"""
    given: tuple[int, ...]
    """the storages of its arguments"""


class KeptStorage(NamedTuple):
    """A storage that a forward pass of the recorded step makes and its backward pass reads."""

    number: int
    read: int
    """the place after which the forward pass does not read it"""
    saves: tuple[tuple[int, int], ...]
    """for each innermost call (-1: none) that keeps it: the call's index, and the place after which
    the backward pass does not read it for that call"""


class Lifetimes(FrozenModel):
    """The storages that a first step and later ones make and free, in order.

    A code n >= 0 makes a storage of `sizes[n]` bytes; from len(sizes) on it is the workspace of an
    operation of the trace, which is freed at once. A code n < 0 frees storage number (-1 - n). The
    count of the step continues that of the start.
    """

    sizes: tuple[Affine, ...]
    start: tuple[int, ...] = Field(description="the model, the batch, and the first step")
    step: tuple[int, ...] = Field(description="each later step")
    graphs: tuple[tuple[int, int, int], ...] | None = Field(
        default=None,
        description="for each micro-batch the places, counted from the start, where autograd's "
        "graph begins, where the backward pass begins and where it has ended; None: not known",
    )
    calls: tuple[ModuleCall, ...] = Field(
        default=(),
        description="of the recorded step, in order of their beginning; empty: not known",
    )
    kept: tuple[KeptStorage, ...] = Field(default=(), description="in order of their numbers")

    @model_validator(mode="after")
    def _numbers_name_something(self) -> Lifetimes:
        made, ended = 0, set()
        for code in (*self.start, *self.step):
            if code < -made or code in ended:
                raise ValueError(
                    f"lifetimes: {code} frees a storage that does not exist; {made} were made"
                )
            made += 0 <= code < len(self.sizes)
            if code < 0:
                ended.add(code)
        if max(self.start, default=-1) >= len(self.sizes):
            raise ValueError("lifetimes: the start can only make storages")
        for graph in self.graphs or ():
            if not 0 <= graph[0] <= graph[1] <= graph[2] <= len(self.start) + len(self.step):
                raise ValueError(f"lifetimes: graphs {graph} are not increasing indices")
        last = len(self.start) + len(self.step)
        for place, call in enumerate(self.calls):
            order = (0, call.begin, call.stop, call.end, call.backward, call.done, last)
            if sorted(order) != [*order] or not -1 <= call.parent < place:
                raise ValueError(f"lifetimes: places of {call.name[:80]!r} are not increasing")
            if not all(0 <= one < made for one in call.given):
                raise ValueError(f"lifetimes: {call.name[:80]!r} is given a storage that is not")
        for kept in self.kept:
            calls = [call for call, _ in kept.saves]
            if not (0 <= kept.number < made and all(-1 <= one < len(self.calls) for one in calls)):
                raise ValueError(f"lifetimes: the kept storage {kept.number} names nothing")
        return self

    def made_bytes(self, batch_size: int, workspaces: Sequence[float], least_bytes: float) -> float:
        """Bytes that a step allocates in storages of `least_bytes` or more.

        `workspaces` are those of the trace's operations.
        """
        import numpy as np

        bytes_of = np.array([*(line(batch_size) for line in self.sizes), *workspaces])
        if not (bytes_of >= least_bytes).any():
            return 0.0
        codes = np.array([code for code in self.step if code >= 0], dtype=np.int64)
        made = bytes_of[codes]
        return float(made[made >= least_bytes].sum())

    def events(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The events of the start and one step, in order, as three arrays of one length.

        The number of the storage, in order of creation (-1 for a workspace); the code that made it;
        1 if it is made, -1 if it is freed, 0 for a workspace.
        """
        import numpy as np

        codes = np.array((*self.start, *self.step), dtype=np.int64)
        made, ended = (codes >= 0) & (codes < len(self.sizes)), codes < 0
        numbers = np.where(made, np.cumsum(made) - 1, -1)
        numbers[ended] = -1 - codes[ended]
        made_by = codes[made]
        codes[ended] = made_by[numbers[ended]]
        return numbers, codes, made.astype(np.int64) - ended

    def successors(self) -> dict[int, int]:
        """Pairs of storages of the same size: one that the step frees, and one that replaces it.

        The next step frees the replacement.
        """
        of = [code for code in (*self.start, *self.step) if 0 <= code < len(self.sizes)]
        found = sum(code >= 0 for code in self.start)
        ended = {-1 - code for code in self.step if code < 0}
        left: dict[int, list[int]] = {}
        for number in range(len(of) - 1, found - 1, -1):
            if number not in ended:
                left.setdefault(of[number], []).append(number)
        return {
            one: left[of[one]].pop() for one in sorted(ended) if one < found and left.get(of[one])
        }
