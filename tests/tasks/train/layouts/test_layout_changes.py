"""A group of other members trains in another layout: the state stays, and so do the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from group_changes import ThreadRank, ThreadRanks
from joint_batch_case import BOUNDS, relative_difference
from layout_ranks import layers_of, whole_state, with_layout
from training_case import alone, request

from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.training_result import SplitEvent, layout_since
from trainwright.tasks.train import TrainRequest

CUTS: dict[str, tuple[int, int]] = {"here/0": (0, 4), "here/1": (4, 7), "here/2": (7, 10)}
SHARDED: dict[str, Any] = {"sync": {"out": "rows"}, "rows": {"out": [4, 3, 3]}}
Made = Callable[..., tuple[TrainRequest, ThreadRanks]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Makes a request of 24 steps by three ranks with batch normalisation, and the ranks."""
    found: list[ThreadRanks] = []

    def make(layout: dict[str, Any] | None = None, **fields: Any) -> tuple[TrainRequest, Any]:
        asked = request(
            tmp_path,
            [30, 20, 10],
            model={"norm": True},
            validation_fraction=1077 / 1797,
            epochs=2,
            precision="fp64",
            optimizer={"name": "adamw", "weight_decay": 0.1},
            clip_norm=2.0,
        )
        asked = asked.model_copy(update={"layers": layers_of(asked), **fields})
        if layout is not None:
            asked = with_layout(asked, **layout)
        found.append(ThreadRanks(asked, tmp_path / f"ranks-{len(found)}"))
        found[-1].folder.mkdir()
        return asked, found[-1]

    yield make
    for ranks in found:
        ranks.each(lambda one: one.out())


def layout_on(asked: TrainRequest, *members: int, **fields: Any) -> Layout:
    """A layout of these devices; `sync` and more are fields of it."""
    whole = asked.layout
    pipelines = [whole.pipelines[number] for number in members]
    return Layout(pipelines=pipelines, chunk_bytes=4096, **fields)


def rows_on(asked: TrainRequest, *members: int, cuts: list[int]) -> Layout:
    ends = [sum(cuts[: place + 1]) for place in range(len(cuts))]
    rows = {
        f"here/{number}": (end - count, end)
        for number, count, end in zip(members, cuts, ends, strict=True)
    }
    return layout_on(asked, *members, sync={"out": "rows"}, rows={"out": rows})


def assert_as_undisturbed(asked: TrainRequest, ranks: ThreadRanks) -> None:
    """The ranks train until the end, and their model equals that of one process."""
    ranks.steps(24)
    assert relative_difference(ranks.state(), alone(asked)) <= BOUNDS["fp64"]


def events_of(one: ThreadRank) -> list[SplitEvent]:
    state = one.training.state
    assert state is not None
    return [SplitEvent.model_validate(event) for event in state.events]


@pytest.mark.parametrize("planned", [None, SHARDED, {"sync": {"out": "factors"}}])
def test_ranks_change_from_layout_to_layout_and_lose_no_step(
    made: Made, planned: dict[str, Any] | None
) -> None:
    asked, ranks = made(planned)
    ranks.group(0, 1, layout=rows_on(asked, 0, 1, cuts=[3, 7]))
    ranks.steps(5)
    ranks.group(0, 1, 2)
    ranks.steps(8)
    ranks.group(0, 1, 2, layout=layout_on(asked, 0, 1, 2, sync={"conv": "sum", "out": "factors"}))
    ranks.steps(11)
    ranks.group(1, 2, layout=layout_on(asked, 1, 2))
    ranks.steps(14)
    ranks.group(2, layout=layout_on(asked, 2))
    ranks.steps(17)
    ranks.group(0, 2, layout=rows_on(asked, 0, 2, cuts=[0, 10]))
    ranks.steps(20)
    ranks.group(0, 1, 2)
    assert not ranks.asked_for("back")
    assert all(one.rank.layout == asked.layout for one in ranks.all)
    assert_as_undisturbed(asked, ranks)


def test_after_lost_rows_the_rest_trains_in_its_new_layout(made: Made) -> None:
    asked, ranks = made(SHARDED)
    ranks.group(0, 1, 2)
    ranks.steps(7)
    ranks.group(1, layout=layout_on(asked, 1))
    assert ranks.asked_for("back")
    assert ranks.all[1].training.finished == 0
    assert not ranks.all[1].rank.is_cut
    ranks.steps(9)
    ranks.group(0, 1, 2)
    assert [one.rank.is_cut for one in ranks.all] == [True] * 3
    assert_as_undisturbed(asked, ranks)


def test_rows_that_a_rank_has_of_another_layout_do_not_count(made: Made) -> None:
    """The third was left out when the others changed their layout, and no step was done since."""
    asked, ranks = made(SHARDED)
    ranks.group(0, 1, 2)
    ranks.steps(7)
    ranks.group(0, 1, 2)
    ranks.members = [0, 1]
    ranks.all[2].out()
    for one in ranks.all[:2]:  # as if they had got its rows
        one.out()
    stale = ranks.all[2].rank
    assert stale.is_cut
    ranks.each(lambda one: one.rank.hold_nothing())
    whole = layout_on(asked, 0, 1)
    ranks.each(lambda one: one.rank.adopt(whole))
    ranks.group(0, 1, 2)
    assert not ranks.asked_for("back")
    assert ranks.each(lambda one: one.training.finished) == [7] * 3
    models = ranks.each(lambda one: whole_state(one.rank)[0])
    assert all(relative_difference(one, models[0]) == 0 for one in models)


def test_a_rank_with_some_rows_refuses_another_layout(made: Made) -> None:
    asked, ranks = made(SHARDED)
    ranks.group(0, 1, 2)
    with pytest.raises(RuntimeError, match="ranks must hold all rows"):
        ranks.all[0].rank.adopt(layout_on(asked, 0, 1, 2))


def test_what_layouts_have_done_to_the_model_is_undone(made: Made) -> None:
    asked, ranks = made(SHARDED)
    rank = ranks.all[0].rank
    rank.adopt(layout_on(asked, 0, 1, 2, sync={"out": "factors"}))
    rank.adopt(layout_on(asked, 0, 1, 2))
    assert "forward" not in vars(rank.model.out)
    hooked = [one for one in rank.model.parameters() if one._post_accumulate_grad_hooks]
    rank.adopt(layout_on(asked, 0, 1, 2).model_copy(update={"chunk_bytes": 8192}))
    assert len(hooked) == len([*rank.model.parameters()])
    assert all(len(one._post_accumulate_grad_hooks) == 1 for one in hooked)


def test_averages_keep_their_interval_and_their_outer_step(made: Made) -> None:
    averaging = {"sync": {}, "average_every": 4, "outer": "nesterov"}
    asked, ranks = made(averaging)
    ranks.group(0, 1, 2)
    ranks.steps(6)
    (before,) = [ranks.all[0].rank.averaging.document()]
    other = layout_on(asked, 0, 1, average_every=6, local_batch=10, outer="nesterov")
    ranks.group(0, 1, layout=other)
    for one in ranks.all[:2]:
        averaging_now = one.rank.averaging
        assert averaging_now is not None
        assert averaging_now.averages == before["averages"] + 1
        assert averaging_now.every <= 6
        assert averaging_now.velocities
    ranks.steps(24)


def test_ranks_stop_training_alone_if_the_layout_says_so(made: Made) -> None:
    """Batch normalisation is then of the joint batch, and averages of buffers end."""
    asked, ranks = made({"sync": {}, "average_every": 4})
    ranks.group(0, 1, 2)
    ranks.steps(4)
    ranks.group(0, 1, layout=layout_on(asked, 0, 1))
    ranks.steps(8)
    models = ranks.each(lambda one: whole_state(one.rank)[0])
    assert relative_difference(models[0], models[1]) == 0
    ranks.group(0, 1, 2)
    ranks.steps(9)
    models = ranks.each(lambda one: whole_state(one.rank)[0])
    assert relative_difference(models[0], models[1]) > 0


def test_each_change_is_an_event_and_a_replay_repeats_it(made: Made) -> None:
    asked, ranks = made(SHARDED)
    ranks.group(0, 1, 2)
    ranks.steps(5)
    other = rows_on(asked, 0, 2, cuts=[9, 1])
    ranks.group(0, 1, 2)
    ranks.steps(6)
    assert not any(event.layout for event in events_of(ranks.all[0]))
    ranks.group(0, 1, 2, layout=layout_on(asked, 0, 1, 2, sync={"out": "factors"}))
    ranks.steps(8)
    ranks.group(0, 2, layout=other)  # rows of the second do not matter: all hold all
    ranks.steps(10)
    ranks.group(0, 1, 2)
    ranks.steps(24)
    events = events_of(ranks.all[0])
    changes = [(event.step, event.layout.name) for event in events if event.layout is not None]
    assert [step for step, _ in changes] == [6, 8, 10]
    assert layout_since(events, Layout(pipelines=[])) == asked.layout
    state = ranks.state()

    _, again = made(SHARDED, replay_events=events)
    again.group(0, 1, 2)
    again.steps(9)
    assert all(one.rank.layout == other for one in again.all)
    again.group(0, 1, 2)  # goes on in the recorded layout
    assert all(one.rank.layout == other for one in again.all)
    again.steps(24)
    repeated = [event.layout for event in events_of(again.all[0]) if event.layout is not None]
    assert repeated == [event.layout for event in events if event.layout is not None]
    assert relative_difference(again.state(), state) <= BOUNDS["fp64"]


def test_a_recorded_layout_of_devices_that_the_plan_lacks_is_passed_over(made: Made) -> None:
    gone = Layout.model_validate(
        {"pipelines": [{"micro_batches": [60], "stages": [{"device": "gone/0", "layers": []}]}]}
    )
    event = SplitEvent(step=2, batch_sizes=[20, 20, 20], reason="recorded", layout=gone)
    asked, ranks = made(SHARDED, replay_events=[event])
    ranks.group(0, 1, 2)
    ranks.steps(4)
    assert all(one.rank.layout == asked.layout for one in ranks.all)
    assert ranks.all[0].rank.split == [20, 20, 20]
    ranks.group(0, 1, 2)
    assert torch.isfinite(next(iter(ranks.state().values()))).all()


def test_a_replay_repeats_a_layout_whose_group_broke_before_it_finished_a_step(made: Made) -> None:
    """The next group has another reason at the same step, and its layout is no change."""
    asked, ranks = made(SHARDED)
    other = rows_on(asked, 0, 1, 2, cuts=[9, 1, 0])
    events = [
        SplitEvent(step=2, batch_sizes=[30, 20, 10], reason="a rank was killed", layout=other),
        SplitEvent(step=2, batch_sizes=[20, 20, 20], reason="a sum failed"),
    ]
    _, ranks = made(SHARDED, replay_events=events)
    ranks.group(0, 1, 2)
    ranks.steps(4)
    assert all(one.rank.layout == other for one in ranks.all)
    assert ranks.all[0].rank.split == [20, 20, 20]
    (repeated,) = events_of(ranks.all[0])
    assert repeated == events[1].model_copy(update={"layout": other})


@pytest.mark.parametrize("last", [4, 6])
def test_moments_are_averaged_among_the_ranks_that_are_left(made: Made, last: int) -> None:
    """Also of a rank that is lost right after an average: the weights are then of this group."""
    _, ranks = made({"sync": {}, "average_every": 4})
    ranks.group(0, 1, 2)
    ranks.steps(last)
    ranks.group(0, 1)
    for one in ranks.all[:2]:
        counters = {float(state["step"]) for state in one.rank.optimizer.state.values()}
        assert counters == {last}


def test_members_of_unlike_layouts_without_a_state_begin_in_the_plans(made: Made) -> None:
    """The third was not in the group whose layout has velocities of averages."""
    asked, ranks = made()
    averaging = layout_on(asked, 0, 1, average_every=4, outer="nesterov")
    ranks.group(0, 1, layout=averaging)
    ranks.steps(5)
    for one in ranks.all:
        one.training.state = None
    ranks.group(0, 1, 2)
    assert ranks.each(lambda one: one.training.finished) == [0] * 3
    assert all(one.rank.layout == asked.layout for one in ranks.all)
    assert_as_undisturbed(asked, ranks)
