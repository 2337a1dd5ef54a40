"""Cuts of pipelines follow measured speeds, if it pays. Without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_plans import case
from pipeline_cases import blocks, units_of
from training_case import request

from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.replan.next_layout import StagePlanner
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.launcher.moved_cuts import (
    LEAST_GAIN,
    MOST_MOVES,
    MOVE_S,
    BetterLayout,
    MovedCuts,
    StageSpeeds,
    StageWindow,
)

MANY = 10_000


def staged(folder: Path, hosts: int = 2, **fields: Any) -> tuple[TrainRequest, StagePlanner]:
    """A request with a planned pipeline of eight blocks, and its planner."""
    layers = blocks()
    job, pool, estimate, data = case(layers, layout="pipeline", hosts=hosts, network="10Gbit")
    known = estimate.model_copy(update={"units": units_of(layers)})
    plan = make_plan(job, pool, known, data)
    changes = {"plan": plan, "job": job, **fields}
    asked = request(folder, [30, 30]).model_copy(update=changes)
    return asked, StagePlanner(job, pool, known, data)


def units(layout: Layout) -> dict[str, int]:
    return {stage.device: len(stage.layers) for one in layout.pipelines for stage in one.stages}


def windows(
    cuts: MovedCuts,
    asked: TrainRequest,
    planner: StagePlanner,
    slower: dict[int, float],
    count: int = 2,
    left: int = MANY,
    layout: Layout | None = None,
) -> list[BetterLayout | None]:
    """What follows from each of some windows in which devices are slower than planned."""
    layout, devices = layout or asked.layout, asked.plan.devices
    times = planner.times(layout, devices, {}).compute_s
    measured = {
        number: times[device.id] * slower.get(number, 1.0) for number, device in enumerate(devices)
    }
    found = []
    for _ in range(count):
        cuts.note(StageWindow(tuple(measured), measured, left), layout)
        cuts.wait()
        found.append(cuts.found())
    return found


def test_a_slower_device_gets_fewer_units_after_two_windows(tmp_path: Path) -> None:
    asked, planner = staged(tmp_path)
    cuts = MovedCuts(asked, planner)
    none, better = windows(cuts, asked, planner, {1: 2.0})
    assert none is None
    assert better is not None
    assert better.members == (0, 1)
    layout = better.layout.layout
    assert layout is not None
    slow, fast = (asked.plan.devices[number].id for number in (1, 0))
    before, after = units(asked.layout), units(layout)
    assert after[slow] < before[slow]
    assert after[fast] > before[fast]
    assert sum(after.values()) == len(asked.plan.units)
    assert f"{slow} takes 200 % of its predicted time" in better.reason
    times = [planner.times(one, asked.plan.devices, {slow: 2.0}) for one in (asked.layout, layout)]
    assert times[0].step_s / times[1].step_s - 1 >= LEAST_GAIN
    assert cuts.slower == pytest.approx({fast: 1.0, slow: 2.0})
    again = windows(cuts, asked, planner, {1: 2.0}, 3, layout=layout)
    assert again == [None] * 3  # it is the best one now
    back = windows(cuts, asked, planner, {}, 3, layout=layout)
    assert back[0] is None
    (moved,) = [one for one in back if one is not None]
    assert moved.layout.layout is not None
    assert planner.times(moved.layout.layout, asked.plan.devices, {}).step_s == pytest.approx(
        planner.times(asked.layout, asked.plan.devices, {}).step_s
    )


def test_cuts_of_stages_that_recompute_move_too(tmp_path: Path) -> None:
    asked, planner = staged(tmp_path)
    pipelines = [
        one.model_copy(
            update={
                "stages": [
                    stage.model_copy(update={"recompute": list(stage.layers)})
                    for stage in one.stages
                ]
            }
        )
        for one in asked.layout.pipelines
    ]
    again = asked.layout.model_copy(update={"pipelines": pipelines})
    _, better = windows(MovedCuts(asked, planner), asked, planner, {1: 2.0}, layout=again)
    assert better is not None
    layout, slow = better.layout.layout, asked.plan.devices[1].id
    assert layout is not None
    assert units(layout)[slow] < units(again)[slow]
    assert f"{slow} takes 200 % of its predicted time" in better.reason


@pytest.mark.parametrize(
    ("slower", "left"), [({}, MANY), ({0: 1.01, 1: 0.99}, MANY), ({1: 2.0}, 3)]
)
def test_cuts_stay_if_speeds_are_as_planned_or_few_steps_are_left(
    tmp_path: Path, slower: dict[int, float], left: int
) -> None:
    asked, planner = staged(tmp_path)
    cuts = MovedCuts(asked, planner)
    assert windows(cuts, asked, planner, slower, 4, left) == [None] * 4


def test_replicas_move_micro_batches_or_cuts_too(tmp_path: Path) -> None:
    asked, planner = staged(tmp_path, hosts=4)
    _, better = windows(MovedCuts(asked, planner), asked, planner, {1: 3.0})
    assert better is not None
    assert better.layout.layout is not None
    assert {*better.layout.layout.devices} == {*asked.layout.devices}


def test_a_replay_and_a_fixed_split_keep_their_cuts(tmp_path: Path) -> None:
    for number, changes in enumerate([{"replay_events": []}, {}]):
        asked, planner = staged(tmp_path / str(number), **changes)
        if not changes:
            spec = asked.job.train.model_copy(update={"adaptive_split": False})
            job = asked.job.model_copy(update={"train": spec})
            asked = asked.model_copy(update={"job": job})
        cuts = MovedCuts(asked, planner)
        assert windows(cuts, asked, planner, {1: 2.0}, 3) == [None] * 3


def test_windows_of_a_group_that_is_gone_do_not_count(tmp_path: Path) -> None:
    asked, planner = staged(tmp_path)
    cuts = MovedCuts(asked, planner)
    for _ in range(3):
        cuts.note(StageWindow((0,), {0: 1.0}, MANY), asked.layout)
        cuts.wait()
    assert cuts.found() is None


@given(
    st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0), st.integers(0, 100)), max_size=30)
)
def test_each_move_gains_in_two_windows_and_moves_end(
    steps: list[tuple[float, float, int]],
) -> None:
    speeds, moves, before = StageSpeeds(), 0, False
    for now_s, then_s, left in steps:
        gains = now_s / then_s - 1 >= LEAST_GAIN and (now_s - then_s) * left >= MOVE_S
        pays = speeds.pays(now_s, then_s, left)
        assert not pays or (gains and before)
        before = gains and not pays
        moves += pays
    assert moves <= MOST_MOVES
