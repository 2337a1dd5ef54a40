"""A replay of ranks that train alone repeats the losses of a run whose group changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from group_changes import ThreadRank, ThreadRanks
from layout_ranks import layers_of, with_layout
from training_case import SLOW, pids, request, rows, when_checkpoint

from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.training_result import SplitEvent
from trainwright.tasks.train import TrainRequest, train

AVERAGING: dict[str, Any] = {"sync": {}, "average_every": 8, "local_batch": 10, "outer": "nesterov"}
MIXED: dict[str, Any] = {"sync": {"conv": "average"}, "average_every": 4}
LAST = 12
Made = Callable[..., tuple[TrainRequest, ThreadRanks]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Makes a request of three ranks with batch normalisation, and the ranks."""
    found: list[ThreadRanks] = []

    def make(layout: dict[str, Any], **fields: Any) -> tuple[TrainRequest, ThreadRanks]:
        asked = request(
            tmp_path,
            [30, 20, 10],
            model={"norm": True},
            validation_fraction=1077 / 1797,
            epochs=2,
            optimizer={"name": "adamw"},
        )
        asked = with_layout(
            asked.model_copy(update={"layers": layers_of(asked), **fields}), **layout
        )
        found.append(ThreadRanks(asked, tmp_path / f"ranks-{len(found)}"))
        found[-1].folder.mkdir()
        return asked, found[-1]

    yield make
    for ranks in found:
        ranks.each(lambda one: one.out())


def break_at(ranks: ThreadRanks, number: int, name: str, last: int) -> None:
    """A rank is lost in the next sum of this name; the others notice."""
    ranks.all[number].peers.breaks_at = name
    assert not any(ranks.succeed(lambda one: one.steps(last)))


def loss(one: ThreadRank) -> float:
    """Of the last step."""
    last = one.training.last
    assert last is not None
    return float(last["row"]["loss"])


def events_of(one: ThreadRank) -> list[SplitEvent]:
    state = one.training.state
    assert state is not None
    return [SplitEvent.model_validate(event) for event in state.events]


def lost_in_a_step(ranks: ThreadRanks, asked: TrainRequest) -> None:
    """Ranks that train alone have updated their parameters before they notice."""
    ranks.steps(5)
    break_at(ranks, 1, "figures", 7)
    ranks.group(0, 2)


def lost_in_the_average(ranks: ThreadRanks, asked: TrainRequest) -> None:
    ranks.steps(3)
    break_at(ranks, 1, "average", 9)
    ranks.group(0, 2)


def lost_twice_in_a_step(ranks: ThreadRanks, asked: TrainRequest) -> None:
    lost_in_a_step(ranks, asked)
    break_at(ranks, 2, "figures", 7)
    ranks.group(0, 2)
    ranks.steps(6)
    break_at(ranks, 2, "figures", 7)
    ranks.group(0)


def lost_while_a_group_forms(ranks: ThreadRanks, asked: TrainRequest) -> None:
    ranks.steps(5)
    break_at(ranks, 1, "figures", 7)
    ranks.all[2].peers.breaks_at = "sent"
    assert not all(ranks.group(0, 2))
    ranks.group(0, 2)


def lost_and_back(ranks: ThreadRanks, asked: TrainRequest) -> None:
    lost_in_a_step(ranks, asked)
    ranks.steps(9)
    ranks.each(leave)
    ranks.all[1].training.state = None
    ranks.group(0, 1, 2)


def leave(one: ThreadRank) -> None:
    """Average as members do before they leave their group between two steps."""
    assert one.training.state is not None
    one.training.batch.average(one.training.state)


def stopped(ranks: ThreadRanks, asked: TrainRequest) -> None:
    """As when a checkpoint is written because the training stops; it goes on from its state."""
    ranks.steps(6)

    def stop(one: ThreadRank) -> None:
        assert one.training.state is not None
        one.training.batch.average(one.training.state, "stopped")
        assert one.rank.averaging is not None
        one.rank.averaging.begin()

    ranks.each(stop)


def another_layout(ranks: ThreadRanks, asked: TrainRequest) -> None:
    """The rest of the ranks sums gradients until the lost one is back."""
    ranks.steps(5)
    break_at(ranks, 1, "figures", 7)
    pipelines = [asked.layout.pipelines[number] for number in (0, 2)]
    ranks.group(0, 2, layout=Layout(pipelines=pipelines))
    ranks.steps(8)
    ranks.group(0, 1, 2)


CHANGES = [
    lost_in_a_step,
    lost_in_the_average,
    lost_twice_in_a_step,
    lost_while_a_group_forms,
    lost_and_back,
    stopped,
    another_layout,
]


@pytest.mark.slow
def test_a_replay_repeats_each_loss_after_a_killed_rank(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    def asked_in(folder: Path, **fields: Any) -> TrainRequest:
        folder.mkdir()
        asked = request(
            folder,
            [30, 20, 10],
            model={"norm": True, "dropout": 0.2},
            validation_fraction=1077 / 1797,
            epochs=4,
            backend="torch",
            optimizer={"name": "adamw"},
            **fields,
        )
        return with_layout(asked.model_copy(update={"layers": layers_of(asked)}), **AVERAGING)

    asked = asked_in(tmp_path / "a", devices=[SLOW[0]] * 3)
    killed = when_checkpoint(tmp_path / "a", 5, lambda: os.kill(pids(heard)[1], signal.SIGKILL))
    result = train(asked)
    killed.join()
    assert result.split_events[0].averaged is not None
    assert result.split_events[0].averaged.by == [0, 2]
    losses = {row["step"]: row["loss"] for row in rows(asked, "steps-rank0")}
    again = asked_in(tmp_path / "b")
    again = again.model_copy(update={"replay_events": result.split_events})
    assert train(again).split_events == result.split_events
    assert {row["step"]: row["loss"] for row in rows(again, "steps-rank0")} == losses


CASES = [*((AVERAGING, change) for change in CHANGES), (MIXED, lost_in_a_step)]
"""Changes with `mixed` are the same but in joint steps."""


@pytest.mark.parametrize(("layout", "change"), CASES)
def test_a_replay_repeats_each_loss_after_a_change(
    made: Made, layout: dict[str, Any], change: Callable[[ThreadRanks, TrainRequest], None]
) -> None:
    asked, ranks = made(layout)
    ranks.group(0, 1, 2)
    change(ranks, asked)
    begun = ranks.all[0].training.finished
    assert begun is not None
    found = {}
    for step in range(begun + 1, LAST + 1):
        ranks.steps(step)
        found[step] = loss(ranks.all[0])
    state, events = ranks.state(), events_of(ranks.all[0])
    assert any(event.averaged is not None for event in events)

    _, again = made(layout, replay_events=events)
    again.group(0, 1, 2)
    again.steps(begun)
    for step in range(begun + 1, LAST + 1):
        again.steps(step)
        assert loss(again.all[0]) == found[step], f"step {step}"
    assert events_of(again.all[0]) == events
    assert all((again.state()[name] == one).all() for name, one in state.items())
