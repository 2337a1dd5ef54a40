"""A worker group's layout: the plan's, or one for its members; planning never stops a training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from training_case import request

from trainwright.tasks.allocate.replan.next_layout import NextLayout
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage
from trainwright.tasks.runs.artefacts.training_result import SplitEvent
from trainwright.tasks.spec.pool import Device
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.launcher import group_layout
from trainwright.tasks.train.launcher.group_layout import GroupLayouts
from trainwright.tasks.train.launcher.planning_thread import PlanningThread
from trainwright.tasks.train.worker_group import WorkerGroup


def layout_of(devices: Sequence[str], batches: Sequence[int], **fields: Any) -> Layout:
    pipelines = [
        Pipeline(micro_batches=[batch], stages=[Stage(device=device, layers=[])])
        for device, batch in zip(devices, batches, strict=True)
    ]
    return Layout(pipelines=pipelines, **fields)


class Planner:
    """Plans data parallel layouts of large chunks, and counts."""

    def __init__(self, then: Callable[[Layout], Layout | None] = lambda one: one) -> None:
        self.calls, self._then = list[tuple[list[str], list[int]]](), then
        self.summed = list[tuple[str, ...]]()
        self.slower = list[dict[str, float]]()

    def __call__(
        self,
        devices: Sequence[Device],
        batches: Sequence[int],
        accumulation: int,
        summed: Collection[str],
        staged: bool,
        slower: Mapping[str, float],
    ) -> NextLayout:
        ids = [one.id for one in devices]
        assert not staged
        self.calls.append((ids, [*batches]))
        self.summed.append((*summed,))
        self.slower.append({**slower})
        return NextLayout(self._then(layout_of(ids, batches, chunk_bytes=8 << 20)), "in words")


@pytest.fixture
def asked(tmp_path: Path) -> TrainRequest:
    return request(tmp_path, [30, 20, 10])


def group(*members: int, **fields: Any) -> WorkerGroup:
    return WorkerGroup(generation=2, members=list(members), reason="a fault", **fields)


def test_all_devices_have_the_plans_layout(asked: TrainRequest) -> None:
    planner = Planner()
    found = GroupLayouts(asked, planner).of(group(0, 1, 2))
    assert found == group(0, 1, 2)
    assert not planner.calls


def test_some_have_one_of_their_own_until_all_are_back(asked: TrainRequest) -> None:
    planner = Planner()
    layouts = GroupLayouts(asked, planner)
    found = layouts.of(group(0, 2))
    assert planner.calls == [(["here/0", "here/2"], [45, 15])]
    assert found.layout == layout_of(["here/0", "here/2"], [45, 15], chunk_bytes=8 << 20)
    assert found.reason == "a fault; layout: in words"
    again = layouts.of(group(0, 2))
    assert (again.layout, again.reason) == (found.layout, "a fault")
    assert len(planner.calls) == 1
    back = layouts.of(group(0, 1, 2))
    assert (back.layout, back.reason) == (None, "a fault; layout: data-parallel")


def test_devices_that_recompute_go_on_so(asked: TrainRequest) -> None:
    planner, plain = Planner(), asked.layout
    again = [
        one.model_copy(update={"stages": [one.stages[0].model_copy(update={"recompute": ["out"]})]})
        for one in plain.pipelines
    ]
    layout = plain.model_copy(update={"pipelines": again})
    plan = asked.plan.model_copy(update={"layout": layout})
    found = GroupLayouts(asked.model_copy(update={"plan": plan}), planner).of(group(0, 2))
    assert found.layout is None
    assert not planner.calls


def test_shares_are_within_what_was_seen_to_fit(asked: TrainRequest) -> None:
    planner = Planner()
    GroupLayouts(asked, planner).of(group(0, 2, limits={0: 25}))
    assert planner.calls == [(["here/0", "here/2"], [25, 35])]


def test_without_a_planner_and_in_a_replay_the_plans_layout_stays(asked: TrainRequest) -> None:
    assert GroupLayouts(asked, None).of(group(0, 2)) == group(0, 2)
    planner = Planner()
    replay = asked.model_copy(update={"replay_events": []})
    assert GroupLayouts(replay, planner).of(group(0, 2)) == group(0, 2)
    assert not planner.calls


def test_a_planner_may_keep_the_layout(asked: TrainRequest, heard: list[dict[str, Any]]) -> None:
    assert GroupLayouts(asked, Planner(lambda one: None)).of(group(0, 2)) == group(0, 2)
    assert not heard


def refuses(_: Layout) -> Layout:
    raise BadInput("train.layout: got 'sharded'; no layer permits it")


def unknown_layer(one: Layout) -> Layout:
    return one.model_copy(update={"sync": {"nowhere": "rows"}})


def takes_long(one: Layout) -> Layout:
    time.sleep(0.5)
    return one


@pytest.mark.parametrize(
    ("fails", "cause"),
    [
        (refuses, "train.layout: got 'sharded'; no layer permits it"),
        (unknown_layer, "layout.sync: got the layer 'nowhere'"),
        (takes_long, "planning took more than 0.05 s"),
    ],
)
def test_if_planning_fails_the_plans_layout_stays_and_a_notice_says_why(
    asked: TrainRequest,
    heard: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    fails: Any,
    cause: str,
) -> None:
    if fails is takes_long:
        monkeypatch.setattr(group_layout, "PLANNING_S", 0.05)
    assert GroupLayouts(asked, Planner(fails)).of(group(0, 2)) == group(0, 2)
    (notice,) = heard
    assert notice["message"].startswith("no layout could be planned for the devices that are left")
    assert cause in notice["message"]
    assert notice["message"].endswith("; the plan's layout stays")


def test_a_late_answer_serves_the_next_group(
    asked: TrainRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_layout, "PLANNING_S", 0.05)
    layouts = GroupLayouts(asked, Planner(takes_long))
    assert layouts.of(group(0, 2)).layout is None
    while layouts.of(group(0, 2)).layout is None:
        time.sleep(0.1)


def test_fewer_samples_than_devices_are_not_planned(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    planner = Planner()
    few = request(tmp_path, [1, 0, 0])
    assert GroupLayouts(few, planner).of(group(0, 2)) == group(0, 2)
    assert "fewer samples than devices" in heard[0]["message"]


def test_a_batch_that_does_not_fit_is_not_planned(asked: TrainRequest) -> None:
    planner = Planner()
    found = GroupLayouts(asked, planner).of(group(0, 2, limits={0: 1, 2: 1}))
    assert (found.layout, planner.calls) == (None, [])


def test_members_connect_if_a_layout_that_they_may_use_needs_it(asked: TrainRequest) -> None:
    plain, rows = group(0, 1, 2), layout_of(["here/0"], [60], sync={"out": "rows"})
    assert not GroupLayouts(asked, None).need_transfers(plain)
    assert GroupLayouts(asked, None).need_transfers(plain.model_copy(update={"layout": rows}))
    event = SplitEvent(step=3, batch_sizes=[60, 0, 0], reason="recorded", layout=rows)
    replay = asked.model_copy(update={"replay_events": [event]})
    assert GroupLayouts(replay, None).need_transfers(plain)


SYNCS: dict[str, Any] = {"sync": {"conv": "factors", "out": "rows"}}


def test_layers_that_must_be_summed_are_planned_so_on_all_devices(asked: TrainRequest) -> None:
    planner = Planner()
    found = GroupLayouts(asked, planner).of(group(0, 1, 2, summed=["out"]))
    assert planner.calls == [(["here/0", "here/1", "here/2"], [30, 20, 10])]
    assert planner.summed == [("out",)]
    assert found.reason == "a fault; layout: in words"


@pytest.mark.parametrize("planner", [None, Planner(refuses)])
def test_layers_that_must_be_summed_are_so_if_planning_fails(
    tmp_path: Path, planner: Planner | None
) -> None:
    asked = request(tmp_path, [30, 20, 10])
    rows = {"out": {"here/0": (0, 10)}}
    layout = layout_of(["here/0", "here/1", "here/2"], [30, 20, 10], **SYNCS, rows=rows)
    plan = asked.plan.model_copy(update={"layout": layout})
    layouts = GroupLayouts(asked.model_copy(update={"plan": plan}), planner)
    found = layouts.of(group(0, 1, 2, summed=["out"])).layout
    assert found is not None
    assert (found.sync, found.rows) == ({"conv": "factors"}, {})
    assert layouts.of(group(0, 1, summed=["out", "conv"])).layout == layout_of(
        ["here/0", "here/1", "here/2"], [30, 20, 10]
    )


def test_a_layer_that_the_plan_averages_is_not_summed_and_the_others_stay(
    asked: TrainRequest,
) -> None:
    """Its rows were those of a layout for other devices."""
    fields: dict[str, Any] = {"sync": {"conv": "average", "out": "factors"}, "average_every": 4}
    layout = layout_of(["here/0", "here/1", "here/2"], [30, 20, 10], **fields)
    plan = asked.plan.model_copy(update={"layout": layout})
    layouts = GroupLayouts(asked.model_copy(update={"plan": plan}), None)
    found = layouts.of(group(0, 1, 2, summed=["conv"])).layout or layout
    assert (found.how("conv"), found.how("elsewhere"), found.alone) == ("average", "sum", False)
    found = layouts.of(group(0, 1, 2, summed=["conv", "out"])).layout or layout
    assert found.sync == {"conv": "average"}


def test_a_layout_by_measured_speeds_is_that_of_its_members_from_then_on(
    asked: TrainRequest,
) -> None:
    layouts = GroupLayouts(asked, Planner())
    other = layout_of(["here/0", "here/1", "here/2"], [10, 10, 40])
    layouts.move([0, 1, 2], NextLayout(other, "other cuts"))
    found = layouts.of(group(0, 1, 2))
    assert (found.layout, found.reason) == (other, "a fault; layout: other cuts")
    assert layouts.current == other
    assert layouts.of(group(0, 2)).layout != other
    assert layouts.of(group(0, 1, 2)).layout == other


class StagesPlanner:
    """Plans whole models on devices that a pipeline has left."""

    def __init__(self) -> None:
        self.planned, self.slower = list[list[str]](), list[dict[str, float]]()

    def __call__(
        self,
        devices: Sequence[Device],
        batches: Sequence[int],
        accumulation: int,
        summed: Collection[str],
        staged: bool,
        slower: Mapping[str, float],
    ) -> NextLayout:
        assert staged
        ids = [one.id for one in devices]
        self.planned.append(ids)
        self.slower.append({**slower})
        return NextLayout(layout_of(ids, batches), "in words")


def staged_on(asked: TrainRequest, **fields: Any) -> TrainRequest:
    """The request with one pipeline of all its devices."""
    stages = [
        Stage(device=one.id, layers=[f"unit{number}"], **fields)
        for number, one in enumerate(asked.plan.devices)
    ]
    layout = Layout(name="pipeline", pipelines=[Pipeline(micro_batches=[60], stages=stages)])
    return asked.model_copy(update={"plan": asked.plan.model_copy(update={"layout": layout})})


@pytest.mark.parametrize("fields", [{}, {"recompute": ["conv"]}])
def test_pipelines_are_planned_ahead_for_each_member_that_may_be_lost(
    asked: TrainRequest, fields: dict[str, Any]
) -> None:
    planner = StagesPlanner()
    layouts = GroupLayouts(staged_on(asked, **fields), planner)
    layouts.of(group(0, 1, 2))
    until = time.monotonic() + 20
    while len(planner.planned) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert {tuple(one) for one in planner.planned} == {
        ("here/1", "here/2"),
        ("here/0", "here/2"),
        ("here/0", "here/1"),
    }
    found = layouts.of(group(0, 2))
    assert found.layout == layout_of(["here/0", "here/2"], [30, 30])
    assert len(planner.planned) == 3
    assert layouts.of(group(0, 1, 2)).layout is None


def test_a_layout_that_is_needed_is_planned_before_those_ahead() -> None:
    begun, go_on = list[int](), threading.Event()

    def plan(key: int) -> int:
        begun.append(key)
        go_on.wait(20)
        if key == 3:
            raise Infeasible("three")
        return 2 * key

    thread = PlanningThread[int, int](plan, "test")
    thread.plan_ahead([0, 1, 2, 3])
    while not begun:
        time.sleep(0.001)
    thread.plan_ahead([2, 3])  # 1 is no longer wanted
    needed = thread.need(3)
    go_on.set()
    with pytest.raises(Infeasible, match="three"):
        needed.result(20)
    assert thread.need(2).result(20) == 4
    assert thread.need(3) is needed
    assert begun == [0, 3, 2]


def test_without_a_planner_no_stage_is_replaced(asked: TrainRequest) -> None:
    with pytest.raises(Infeasible, match="a stage of the pipelines is missing: only a training"):
        GroupLayouts(staged_on(asked), None).layout_of_some([0, 2]).result()


def test_after_stages_an_infeasible_answer_is_no_layout(asked: TrainRequest) -> None:
    def refuses(*_: Any) -> NextLayout:
        raise Infeasible("no feasible plan: memory binds")

    layouts = GroupLayouts(staged_on(asked), refuses)
    with pytest.raises(Infeasible, match="memory binds"):
        layouts.layout_of_some([0, 2]).result(20)
    with pytest.raises(Infeasible, match="memory binds"):
        layouts.of(group(0, 2))


def test_a_group_that_only_ends_the_training_is_not_planned(asked: TrainRequest) -> None:
    planner, staged = Planner(), StagesPlanner()
    assert GroupLayouts(asked, planner).of(group(0, 2, end=True)).layout is None
    found = GroupLayouts(staged_on(asked), staged).of(group(0, 2, end=True)).layout
    assert found == layout_of(["here/0", "here/2"], [30, 30])
    assert not planner.calls
    assert not staged.planned


def test_layouts_with_rows_are_planned_ahead_too(asked: TrainRequest) -> None:
    planner = Planner()
    sharded = asked.layout.model_copy(
        update={
            "name": "sharded",
            "sync": {"out": "rows"},
            "rows": {"out": {"here/0": (0, 5), "here/1": (5, 8), "here/2": (8, 10)}},
        }
    )
    plan = asked.plan.model_copy(update={"layout": sharded})
    layouts = GroupLayouts(asked.model_copy(update={"plan": plan}), planner)
    layouts.of(group(0, 1, 2))
    until = time.monotonic() + 20
    while len(planner.calls) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(planner.calls) == 3
    found = layouts.of(group(0, 2))
    assert found.layout == layout_of(["here/0", "here/2"], [45, 15], chunk_bytes=8 << 20)
    assert len(planner.calls) == 3


@pytest.mark.parametrize(("local", "parts"), [(None, [60]), (20, [20, 20, 20])])
def test_averages_that_stay_on_one_device_have_its_layout(
    asked: TrainRequest, local: int | None, parts: list[int]
) -> None:
    """The layout that they report is the one in which they train."""
    planned = layout_of(
        ["here/0", "here/1", "here/2"],
        [30, 20, 10],
        name="mixed",
        sync={"conv": "average", "out": "rows"},
        rows={"out": {"here/0": (0, 5), "here/1": (5, 8), "here/2": (8, 10)}},
        average_every=4,
        local_batch=local,
    )
    plan = asked.plan.model_copy(update={"layout": planned})
    layouts = GroupLayouts(
        asked.model_copy(update={"plan": plan}),
        Planner(lambda one: one if len(one.devices) > 1 else None),
    )
    layouts.of(group(0, 1, 2))
    found = layouts.of(group(1))
    assert found.layout == planned.model_copy(
        update={
            "pipelines": [
                Pipeline(micro_batches=parts, stages=[Stage(device="here/1", layers=[])])
            ],
            "rows": {"out": {"here/1": (0, 10)}},
        }
    )
    assert found.reason == "a fault; layout: mixed on one device"
    assert layouts.of(group(0, 1, 2)).layout is None


def test_layouts_are_planned_by_measured_weights(asked: TrainRequest) -> None:
    planner = Planner()
    layouts = GroupLayouts(asked, planner)
    layouts.weigh([45.0, 10.0, 5.0])
    layouts.of(group(0, 2))
    assert planner.calls == [(["here/0", "here/2"], [53, 7])]
    assert planner.slower == [{"here/0": 30 / 45, "here/2": 2.0}]


def test_stages_are_planned_by_measured_speeds_if_they_differ_clearly(
    asked: TrainRequest,
) -> None:
    planner = StagesPlanner()
    layouts = GroupLayouts(staged_on(asked), planner)
    layouts.measure({"here/0": 1.1, "here/1": 0.9, "here/2": 1.0})
    layouts.weigh([60.0, 0.0, 0.0])  # those of stages say nothing
    layouts.of(group(0, 2))
    assert planner.slower == [{"here/0": 1.0, "here/2": 1.0}]
    layouts.measure({"here/0": 1.1, "here/1": 0.9, "here/2": 2.0})
    layouts.measure({"here/0": 1.0, "here/1": 0.9, "here/2": 2.2})
    layouts.of(group(0, 2))
    assert planner.slower[1:] == [{"here/0": 1.1, "here/2": 2.0}]


def test_a_grown_batch_is_planned_for(asked: TrainRequest) -> None:
    planner = Planner()
    layouts = GroupLayouts(asked, planner)
    layouts.of(group(0, 1, 2))
    layouts.follow(120)
    layouts.of(group(0, 2))
    assert planner.calls == [(["here/0", "here/2"], [90, 30])]
