"""Moves the cuts of pipelines when stages take other times than planned, and it pays.

The ranks report windows of steps: the median compute time t_d of each device d. A device's factor
is f_d = t_d / p_d, with p_d what the simulated step says, a mean over windows with the same layout.
The planner makes a layout for the devices' estimates times f. With T the simulated step of the
current layout and T' that of the new one, both by f, the layout changes if

    T / T' - 1 >= LEAST_GAIN   and   (T - T') · steps left >= MOVE_S

hold in two windows, one after the other.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainwright.tasks import progress
from trainwright.tasks.allocate.replan.next_layout import NextLayout, StagePlanner
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train.request import TrainRequest

LEAST_GAIN = 0.05
MOVE_S = 5.0
"""A move must save so many seconds: about what it may take, with a margin."""
MOST_WINDOWS = 8
"""The most windows that a mean counts, so that it follows slow changes."""
OTHER_SPEED = 0.15
"""A device whose time differs by this much from its mean has another speed."""
MOST_MOVES = 3
"""The most moves while no device's speed changes: more would not find a better layout."""


@dataclass(frozen=True)
class StageWindow:
    """What ranks measured in some steps of a layout."""

    members: tuple[int, ...]
    compute_s: Mapping[int, float]
    """the median of each device's steps, by number"""
    steps_left: int


@dataclass(frozen=True)
class BetterLayout:
    """A layout for these members that pays."""

    members: tuple[int, ...]
    layout: NextLayout
    reason: str


@dataclass
class StageSpeeds:
    """The mean compute time of each device in windows with one layout."""

    layout: Layout | None = None
    mean_s: dict[str, float] = field(default_factory=dict)
    windows: int = 0
    moves: int = 0
    """since a device's speed last changed"""
    asked_before: bool = False

    def observe(self, layout: Layout, compute_s: Mapping[str, float]) -> None:
        """Add a window; `compute_s` by device id."""
        if layout != self.layout or {*compute_s} != {*self.mean_s}:
            self.layout, self.mean_s, self.windows = layout, dict(compute_s), 1
            self.asked_before = False
            return
        is_other = any(
            abs(seconds / self.mean_s[device] - 1) > OTHER_SPEED
            for device, seconds in compute_s.items()
        )
        if is_other:
            self.mean_s, self.windows, self.moves = dict(compute_s), 1, 0
            self.asked_before = False
            return
        self.windows = min(self.windows + 1, MOST_WINDOWS)
        for device, seconds in compute_s.items():
            self.mean_s[device] += (seconds - self.mean_s[device]) / self.windows

    def pays(self, now_s: float, then_s: float, steps_left: int) -> bool:
        """Whether to change from a step of `now_s` to `then_s`: in the second such window."""
        gains = now_s / then_s - 1 >= LEAST_GAIN and (now_s - then_s) * steps_left >= MOVE_S
        twice, self.asked_before = gains and self.asked_before, gains
        if twice and self.moves < MOST_MOVES:
            self.moves, self.asked_before = self.moves + 1, False
            return True
        return False


class MovedCuts:
    """Plans in a thread, so that the launcher goes on."""

    def __init__(self, request: TrainRequest, planner: StagePlanner | None) -> None:
        """`planner`: None in a replay or a search, which keep their layouts."""
        adapts = request.job.train.adaptive_split and request.replay_events is None
        self._request, self._planner = request, planner if adapts else None
        self.speeds = StageSpeeds()
        self.slower: Mapping[str, float] = {}
        """by device id: how many times as long as estimated it took when it was last in a stage"""
        self._better: queue.SimpleQueue[BetterLayout] = queue.SimpleQueue()
        self._working: threading.Thread | None = None

    def note(self, window: StageWindow, layout: Layout) -> None:
        """The members have trained a window of steps in this layout."""
        busy = self._working is not None and self._working.is_alive()
        if self._planner is None or busy or not layout.has_stages:
            return
        if {*layout.devices} != {self._request.plan.devices[one].id for one in window.members}:
            return  # of an earlier group
        self._working = threading.Thread(
            target=self._work, args=(window, layout), name="cuts", daemon=True
        )
        self._working.start()

    def found(self) -> BetterLayout | None:
        """A layout that pays, once."""
        return None if self._better.empty() else self._better.get()

    def wait(self) -> None:
        """Wait until the last window is evaluated."""
        if self._working is not None:
            self._working.join()

    def _work(self, window: StageWindow, layout: Layout) -> None:
        try:
            found = self._evaluated(window, layout)
        except Exception as error:  # noqa: BLE001 - a boundary: the training goes on
            cause = str(error) or type(error).__name__
            progress.emit("notice", message=f"no other cuts could be planned: {cause}")
            return
        if found is not None:
            self._better.put(found)

    def _evaluated(self, window: StageWindow, layout: Layout) -> BetterLayout | None:
        assert self._planner is not None
        plan = self._request.plan
        devices = [plan.devices[number] for number in window.members]
        by_id = {plan.devices[number].id: one for number, one in window.compute_s.items()}
        self.speeds.observe(layout, by_id)
        planned = self._planner.times(layout, devices, {})
        slower = _factors(self.speeds.mean_s, planned.compute_s)
        self.slower = {**self.slower, **slower}
        batch = sum(sum(one.micro_batches) for one in layout.pipelines)
        found = self._planner.plan(devices, batch, slower)
        if found is None or found.layout is None or found.layout == layout:
            self.speeds.asked_before = False
            return None
        now = self._planner.times(layout, devices, slower)
        then = self._planner.times(found.layout, devices, slower)
        if not self.speeds.pays(now.step_s, then.step_s, window.steps_left):
            return None
        reason = (
            f"{_differ_most(slower)}; a step takes {now.step_s * 1e3:.1f} ms, with other cuts "
            f"{then.step_s * 1e3:.1f} ms expected"
        )
        return BetterLayout(window.members, found, reason)


def _factors(mean_s: Mapping[str, float], planned_s: Mapping[str, float]) -> dict[str, float]:
    """How many times as long as planned each device takes."""
    return {one: mean_s[one] / planned_s[one] for one in mean_s if planned_s.get(one, 0.0) > 0}


def _differ_most(slower: Mapping[str, float]) -> str:
    """The device whose time differs most from the predicted one, in words."""
    device = max(slower, key=lambda one: abs(math.log(slower[one])))
    return f"{device} takes {100 * slower[device]:.0f} % of its predicted time"
