"""Pipelines whose ranks are lost and come back, or whose cuts move: no finished step is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from group_changes import ThreadRank, ThreadRanks
from joint_batch_case import BOUNDS, relative_difference
from staged_case import recomputing, with_dense, with_stages, without_dropout
from training_case import alone, request

from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage, Sync
from trainwright.tasks.runs.artefacts.training_result import SplitEvent
from trainwright.tasks.train import TrainRequest

STEPS = 24
DEEP = """
import torch


def build_model():
    layers = [torch.nn.Flatten()]
    for inputs, outputs in ((64, 24), (24, 20), (20, 16), (16, 12)):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(12, 10))
"""


@pytest.fixture
def asked(tmp_path: Path) -> TrainRequest:
    """24 steps of two pipelines of two stages each."""
    plain = request(
        tmp_path,
        [40, 0, 20, 0],
        validation_fraction=1077 / 1797,
        epochs=2,
        precision="fp64",
        optimizer={"name": "adamw", "weight_decay": 0.1},
    )
    (tmp_path / "source" / "net.py").write_text(DEEP)
    return with_stages(plain, [([20, 20], [0.5]), ([10, 10], [0.5])])


class Groups:
    """Makes the ranks of requests, which leave their groups at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.made = folder, list[ThreadRanks]()

    def of(self, asked: TrainRequest) -> ThreadRanks:
        folder = self._folder / f"ranks-{len(self.made)}"
        folder.mkdir()
        self.made.append(ThreadRanks(asked, folder))
        return self.made[-1]


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    found = Groups(tmp_path)
    yield found
    for ranks in found.made:
        ranks.each(lambda one: one.out())


def cut_at(asked: TrainRequest, pipelines: list[tuple[list[int], list[int], list[int]]]) -> Layout:
    """A layout: for each pipeline its micro-batches, devices, and how many units each has."""
    names, made = [one.name for one in asked.plan.units], []
    for sizes, members, counts in pipelines:
        ends = [sum(counts[:place]) for place in range(len(counts) + 1)]
        ends[-1] = len(names)
        stages = [
            Stage(device=f"here/{number}", layers=names[ends[place] : ends[place + 1]])
            for place, number in enumerate(members)
        ]
        made.append(Pipeline(micro_batches=sizes, stages=stages))
    return Layout(name="pipeline", pipelines=made)


def whole(asked: TrainRequest, *members: int) -> Layout:
    size = 60 // len(members)
    pipelines = [
        Pipeline(micro_batches=[size], stages=[Stage(device=f"here/{number}", layers=[])])
        for number in members
    ]
    return Layout(pipelines=pipelines)


def events_of(one: ThreadRank) -> list[SplitEvent]:
    state = one.training.state
    assert state is not None
    return [SplitEvent.model_validate(event) for event in state.events]


@pytest.mark.parametrize("lost", range(4))
def test_each_rank_may_be_lost_and_its_stage_comes_from_the_other_pipeline(
    asked: TrainRequest, groups: Groups, lost: int
) -> None:
    ranks, left = groups.of(asked), [one for one in range(4) if one != lost]
    ranks.group(0, 1, 2, 3)
    ranks.steps(7)
    mate = {0: 1, 1: 0, 2: 3, 3: 2}[lost]
    others = [one for one in left if one != mate]
    ranks.group(*left, layout=cut_at(asked, [([30], others, [3, 9]), ([30], [mate], [0])]))
    ranks.steps(11)
    ranks.group(0, 1, 2, 3)  # it is back
    assert not ranks.asked_for("back")
    assert ranks.each(lambda one: one.training.finished) == [11] * 4
    assert ranks.all[0].rank.split == [40, 0, 20, 0]
    ranks.steps(STEPS)
    assert relative_difference(ranks.state(), alone(asked)) <= BOUNDS["fp64"]


@pytest.mark.parametrize("misses", ["figures", "norm"])
@pytest.mark.parametrize("way", ["sum", "factors"])
def test_a_step_that_only_one_rank_has_ended_is_ended_by_all_who_have_its_gradients(
    asked: TrainRequest, groups: Groups, misses: str, way: Sync
) -> None:
    clip = 0.5 if misses == "norm" else None
    spec = asked.job.train.model_copy(update={"clip_norm": clip})
    asked = asked.model_copy(update={"job": asked.job.model_copy(update={"train": spec})})
    ranks = groups.of(with_dense(asked, [way]))
    ranks.group(0, 1, 2, 3)
    ranks.steps(7)
    for one in ranks.all[1:]:
        one.peers.misses = misses
    assert ranks.succeed(lambda one: one.steps(8)) == [True, False, False, False]
    assert ranks.each(lambda one: one.training.finished) == [8, 7, 7, 7]
    left = cut_at(asked, [([30], [0, 2], [3, 9]), ([30], [1], [0])])
    ranks.group(0, 1, 2, layout=left)
    assert not ranks.asked_for("back")
    assert ranks.each(lambda one: one.training.finished) == [8] * 3
    ranks.steps(11)
    ranks.group(0, 1, 2, 3)
    ranks.steps(STEPS)
    assert relative_difference(ranks.state(), alone(asked)) <= BOUNDS["fp64"]


def test_two_lost_ranks_of_one_pipeline_cost_no_step(asked: TrainRequest, groups: Groups) -> None:
    ranks = groups.of(asked)
    ranks.group(0, 1, 2, 3)
    ranks.steps(7)
    ranks.group(2, 3, layout=cut_at(asked, [([30, 30], [2, 3], [2, 9])]))
    ranks.steps(9)
    ranks.group(2, layout=whole(asked, 2))
    assert ranks.asked_for("back")  # the last stage is lost with its only holder


def test_cuts_of_stages_that_recompute_move_too(
    asked: TrainRequest, groups: Groups, tmp_path: Path
) -> None:
    (tmp_path / "source" / "net.py").write_text(without_dropout(DEEP))
    asked = recomputing(asked)
    moved = cut_at(asked, [([10, 10], [0, 1], [1, 9]), ([20, 20], [2, 3], [2, 9])])
    layout = recomputing(asked, layout=moved).plan.layout
    assert layout is not None
    assert layout.recomputes
    ranks = groups.of(asked)
    ranks.group(0, 1, 2, 3)
    ranks.steps(5)
    ranks.group(0, 1, 2, 3, layout=layout)
    ranks.steps(STEPS)
    (change,) = [one for one in events_of(ranks.all[0]) if one.layout is not None]
    assert (change.step, change.layout) == (5, layout)
    assert relative_difference(ranks.state(), alone(asked)) <= BOUNDS["fp64"]


def test_moved_cuts_and_micro_batches_are_events_that_a_replay_repeats(
    asked: TrainRequest, groups: Groups
) -> None:
    ranks = groups.of(asked)
    ranks.group(0, 1, 2, 3)
    ranks.steps(5)
    moved = cut_at(asked, [([10, 10], [0, 1], [1, 9]), ([20, 20], [2, 3], [2, 9])])
    ranks.group(0, 1, 2, 3, layout=moved)
    assert ranks.all[0].rank.split == [20, 0, 40, 0]
    ranks.steps(12)
    ranks.group(0, 1, 2, 3, layout=moved)  # formed again: no change
    ranks.steps(STEPS)
    events = events_of(ranks.all[0])
    (change,) = [one for one in events if one.layout is not None]
    assert (change.step, change.layout, change.batch_sizes) == (5, moved, [20, 0, 40, 0])
    state = ranks.state()
    assert relative_difference(state, alone(asked)) <= BOUNDS["fp64"]

    again = groups.of(asked.model_copy(update={"replay_events": events}))
    again.group(0, 1, 2, 3)

    def replay(one: ThreadRank) -> None:
        for step in range(STEPS):
            assert one.training.state is not None
            one.training.batch.obey_replay(one.training.state)
            one.steps(step + 1)

    again.each(replay)
    assert all(one.rank.layout == moved for one in again.all)
    repeated = again.state()
    assert all((repeated[name] == value).all() for name, value in state.items())
