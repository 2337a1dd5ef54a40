"""Ranks come and go: what is left goes on from the newest state, and no finished step is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from group_changes import ThreadRank, ThreadRanks
from joint_batch_case import BOUNDS, relative_difference
from layout_ranks import whole_state, with_layout
from training_case import alone, request

from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.exchange.collective import PeersLost
from trainwright.tasks.train.rank.divergence import LossDiverged, require_finite
from trainwright.tasks.train.rank.rank import Rank
from trainwright.tasks.train.worker.lr_ramp import begin_search
from trainwright.tasks.train.worker_group import WorkerGroup

SHARDED: dict[str, Any] = {"sync": {"out": "rows"}, "rows": {"out": [4, 3, 3]}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data-parallel": {"sync": {}},
    "late-multiply": {"sync": {"out": "factors"}},
    "sharded": SHARDED,
}
MIXED_ROWS: dict[str, Any] = {
    "sync": {"conv": "average", "out": "rows"},
    "rows": {"out": [4, 3, 3]},
    "average_every": 4,
}
Made = Callable[..., tuple[TrainRequest, ThreadRanks]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Makes a request of 24 steps by three ranks, and the ranks."""
    found: list[ThreadRanks] = []

    def make(layout: dict[str, Any]) -> tuple[TrainRequest, ThreadRanks]:
        asked = with_layout(
            request(
                tmp_path,
                [30, 20, 10],
                validation_fraction=1077 / 1797,
                epochs=2,
                precision="fp64",
                optimizer={"name": "adamw", "weight_decay": 0.1},
                clip_norm=2.0,
            ),
            **layout,
        )
        found.append(ThreadRanks(asked, tmp_path / f"ranks-{len(found)}"))
        found[-1].folder.mkdir()
        return asked, found[-1]

    yield make
    for ranks in found:
        ranks.each(lambda one: one.out())


def assert_as_undisturbed(asked: TrainRequest, ranks: ThreadRanks) -> None:
    """The ranks train until the end, and their model equals that of one process."""
    ranks.steps(24)
    assert relative_difference(ranks.state(), alone(asked)) <= BOUNDS["fp64"]


def test_a_split_by_measured_speeds_is_reported_with_its_weights(tmp_path: Path) -> None:
    asked = request(tmp_path, [30, 30], validation_fraction=1077 / 1797, adaptive_split=True)
    ranks = ThreadRanks(asked, tmp_path)
    ranks.group(0, 1)

    def window(one: ThreadRank) -> None:
        state, batch = one.training.state, one.training.batch
        assert state is not None
        for _ in range(20):
            batch.note(0.1 * state.split[one.number] / (20 if one.number else 40), 0.2)
        batch.rebalance(state)

    for _ in range(3):
        ranks.each(window)
    assert ranks.all[0].rank.split == [40, 20]
    weights = [fields["weights"] for kind, fields in ranks.all[0].channel.sent if kind == "weights"]
    assert weights[-1] == pytest.approx([40, 20])
    assert not any(kind == "weights" for kind, _ in ranks.all[1].channel.sent)
    ranks.each(lambda one: one.out())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_joins_gets_its_rows_with_their_optimizer_state(
    made: Made, layout: str
) -> None:
    asked, ranks = made(LAYOUTS[layout])
    ranks.group(0, 2)
    ranks.steps(7)
    ranks.group(0, 1, 2)
    ranks.steps(15)
    assert not ranks.asked_for("back")
    assert_as_undisturbed(asked, ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_alone_trains_like_all(made: Made, layout: str) -> None:
    asked, ranks = made(LAYOUTS[layout])
    ranks.group(1)
    assert_as_undisturbed(asked, ranks)


@pytest.mark.parametrize("layout", ["data-parallel", "late-multiply"])
def test_without_a_lost_rank_of_whole_copies_no_step_is_lost(made: Made, layout: str) -> None:
    asked, ranks = made(LAYOUTS[layout])
    ranks.group(0, 1, 2)
    ranks.steps(7)
    ranks.group(1, 2)
    assert_as_undisturbed(asked, ranks)


def test_a_lost_rank_without_rows_costs_no_step(made: Made) -> None:
    asked, ranks = made({"sync": {"out": "rows"}, "rows": {"out": [7, 0, 3]}})
    ranks.group(0, 1, 2)
    ranks.steps(7)
    ranks.group(0, 2)
    assert not ranks.asked_for("back")
    assert ranks.all[0].training.finished == 7
    assert_as_undisturbed(asked, ranks)


@pytest.mark.parametrize("lost", [0, 2])
def test_rows_lost_with_their_rank_come_from_the_checkpoint(made: Made, lost: int) -> None:
    asked, ranks = made(SHARDED)
    ranks.group(0, 1, 2)
    ranks.steps(7)
    ranks.group(*{0, 1, 2} - {lost})
    assert ranks.asked_for("back")
    assert ranks.each(lambda one: one.training.finished) == [0, 0]
    assert_as_undisturbed(asked, ranks)


def test_a_rank_with_all_rows_replaces_those_that_a_broken_group_has_cut(made: Made) -> None:
    asked, ranks = made(SHARDED)
    ranks.group(0, 1, 2)
    ranks.all[1].rank.begin_anew()  # as one whose source adapts the whole model
    assert ranks.all[0].rank.is_cut
    assert not ranks.all[1].rank.is_cut
    ranks.group(0, 1)
    assert not ranks.asked_for("back")
    assert ranks.each(lambda one: one.rank.is_cut) == [True, True]
    assert_as_undisturbed(asked, ranks)


@pytest.mark.parametrize(
    ("layout", "breaks_at"),
    [
        *((layout, sum_) for layout in LAYOUTS for sum_ in ("sent", "state")),
        *(("sharded", sum_) for sum_ in ("layouts", "rows held", "rows out", "rows moved")),
    ],
)
def test_a_rank_has_no_state_before_it_has_received_all_of_it(
    made: Made, layout: str, breaks_at: str
) -> None:
    asked, ranks = made(LAYOUTS[layout])
    ranks.group(1, 2)
    ranks.steps(7)
    ranks.all[1].peers.breaks_at = breaks_at
    assert ranks.group(0, 1, 2) == [False, False, False]
    assert [one.training.finished for one in ranks.all] == [None, 7, 7]
    ranks.group(0, 1, 2)
    assert not ranks.asked_for("back")
    assert_as_undisturbed(asked, ranks)


@pytest.mark.parametrize("breaks_at", ["finished", "layouts", "rows held"])
def test_rows_that_a_rank_took_count_after_more_than_one_broken_group(
    made: Made, breaks_at: str
) -> None:
    asked, ranks = made(SHARDED)
    ranks.group(1, 2)
    ranks.steps(7)
    ranks.all[1].peers.breaks_at = "state"
    assert ranks.group(0, 1, 2) == [False, False, False]
    ranks.all[2].peers.breaks_at = breaks_at
    assert ranks.group(0, 1, 2) == [False, False, False]
    ranks.group(0, 1, 2)
    assert not ranks.asked_for("back")
    assert_as_undisturbed(asked, ranks)


def test_a_rank_lost_while_rows_are_put_together_for_a_checkpoint_changes_nothing(
    made: Made,
) -> None:
    asked, ranks = made(SHARDED)
    ranks.group(0, 1, 2)
    ranks.steps(7)
    ranks.all[2].peers.breaks_at = "rows "
    saved = ranks.succeed(lambda one: whole_state(one.rank))
    assert saved == [False, False, False]
    ranks.group(0, 1, 2)
    assert not ranks.asked_for("back")
    assert_as_undisturbed(asked, ranks)


def test_ranks_without_a_checkpoint_s_state_do_not_count_as_at_step_0(made: Made) -> None:
    _, ranks = made(SHARDED)
    ranks.all[0].peers.breaks_at = "state"
    assert ranks.group(0, 1, 2) == [False, False, False]
    assert [one.training.finished for one in ranks.all] == [None, None, None]


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), MIXED_ROWS], ids=[*LAYOUTS, "mixed"])
def test_a_search_for_the_learning_rate_trains_every_layer_from_the_start(
    made: Made, layout: dict[str, Any]
) -> None:
    _, ranks = made(layout)
    ranks.group(0, 1, 2)
    ranks.steps(3)
    trained = ranks.state()

    def searched(one: ThreadRank) -> None:
        begin_search(one.rank, WorkerGroup(generation=1, members=[0, 1, 2]))
        order = one.rank.epoch_order(0)
        for step in range(3):
            one.rank.step(order, 60 * step, step)
            one.rank.update(one.asked.learning_rate)
            one.rank.average_if_due()

    ranks.each(searched)
    assert relative_difference(ranks.state(), trained) == 0


def test_a_step_with_sharded_layers_that_are_not_cut_fails(made: Made) -> None:
    _, ranks = made(SHARDED)
    ranks.group(0, 1, 2)

    def act(one: ThreadRank) -> None:
        one.rank.hold_nothing()
        with pytest.raises(RuntimeError, match="before `cut`: out would not be trained"):
            one.rank.step(one.rank.epoch_order(0), 0, 0)

    ranks.each(act)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_find_parameters_that_are_not_finite(made: Made, layout: str) -> None:
    _, ranks = made(LAYOUTS[layout])
    ranks.group(0, 1, 2)
    ranks.each(lambda one: require_finite(one.rank, 4))
    with torch.no_grad():
        for one in ranks.all if layout != "sharded" else ranks.all[1:2]:
            one.rank.model.out.weight[0, 0] = float("nan")  # type: ignore[union-attr, index, operator]

    def act(one: ThreadRank) -> None:
        with pytest.raises(LossDiverged, match="NaN or infinite after step 3"):
            require_finite(one.rank, 4)

    ranks.each(act)


@pytest.mark.parametrize("members", [(0, 1, 2), (1, 2)])
def test_the_noise_scale_of_sharded_layers_is_that_of_data_parallel_ranks(
    made: Made, members: tuple[int, ...]
) -> None:
    found = []
    for layout in ({"sync": {}}, {"sync": {"out": "rows"}, "rows": {"out": [0, 5, 5]}}):
        _, ranks = made(layout)
        ranks.group(0, 1, 2)
        ranks.steps(7)
        ranks.group(*members)
        ranks.steps(9)
        ranks.each(lambda one: one.rank.join_squares())
        found.append(ranks.each(lambda one: one.rank.noise_document()))
    for plain, sharded in zip(*found, strict=True):
        assert sharded == pytest.approx(plain, rel=1e-9)


AVERAGING: dict[str, Any] = {"sync": {}, "average_every": 4}
MIXED: dict[str, Any] = {"sync": {"out": "average"}, "average_every": 4}


def own_states(ranks: ThreadRanks) -> list[dict[str, torch.Tensor]]:
    """Each member's own model."""
    return ranks.each(
        lambda one: {name: value.clone() for name, value in one.rank.model.state_dict().items()}
    )


def weighted(states: list[dict[str, torch.Tensor]], samples: list[int]) -> dict[str, torch.Tensor]:
    """The average of models, each with its number of samples."""
    shares = [one / sum(samples) for one in samples]
    return {
        name: sum(share * one[name] for share, one in zip(shares, states, strict=True))
        for name in states[0]
    }


def updates(ranks: ThreadRanks) -> list[set[float]]:
    """By member: how many updates each parameter has had."""
    return ranks.each(lambda one: {float(value["step"]) for value in optimizer_states(one.rank)})


def optimizer_states(rank: Rank) -> list[dict[str, Any]]:
    return list(rank.optimizer.state.values())


@pytest.mark.parametrize("layout", [AVERAGING, MIXED], ids=["averaging", "mixed"])
def test_the_rest_average_what_they_have_done_alone(made: Made, layout: dict[str, Any]) -> None:
    _, ranks = made(layout)
    ranks.group(0, 1, 2)
    ranks.steps(6)  # two since the average after the fourth
    before = own_states(ranks)
    assert relative_difference(before[0], before[1]) > 1e-6
    ranks.group(0, 1)
    expected = weighted(before[:2], [60, 40])
    for one in own_states(ranks):
        assert relative_difference(one, expected) <= 1e-12
    assert ranks.each(lambda one: one.training.finished) == [6, 6]
    ranks.steps(24)


def test_a_rank_that_joins_takes_the_average_of_the_others(made: Made) -> None:
    _, ranks = made({**AVERAGING, "outer": "nesterov"})
    ranks.group(0, 2)
    ranks.steps(7)
    ranks.group(0, 1, 2)
    first, *others = ranks.each(
        lambda one: (one.rank.averaging.document(), one.rank.averaging.velocities)
    )
    for document, velocities in others:
        assert document == first[0]
        assert all(torch.equal(velocities[name], value) for name, value in first[1].items())
    found = own_states(ranks)
    assert all(relative_difference(one, found[0]) == 0 for one in found)
    ranks.steps(24)


@pytest.mark.parametrize("layout", [AVERAGING, MIXED_ROWS], ids=["averaging", "rows"])
def test_averages_go_on_on_one_device_in_its_layout(made: Made, layout: dict[str, Any]) -> None:
    asked, ranks = made(layout)
    planned = asked.layout
    last = planned.pipelines[2].model_copy(update={"micro_batches": [60]})
    rows = {name: {"here/2": (0, 10)} for name in planned.rows}
    ranks.group(0, 1, 2)
    ranks.steps(5)
    ranks.group(2, layout=planned.model_copy(update={"pipelines": [last], "rows": rows}))
    begun = ranks.all[2].training.finished
    assert begun == (0 if rows else 5)  # rows of the others are lost with them
    ranks.steps(9)
    ranks.group(0, 1, 2)
    assert ranks.each(lambda one: one.training.finished) == [9] * 3
    ranks.steps(24)


@pytest.mark.parametrize("layout", [AVERAGING, MIXED], ids=["averaging", "mixed"])
@pytest.mark.parametrize("breaks_at", ["average fp64 0", "divergence"])
def test_a_broken_average_is_done_again_but_not_its_step(
    made: Made, layout: dict[str, Any], breaks_at: str
) -> None:
    _, ranks = made(layout)
    ranks.group(0, 1, 2)
    ranks.steps(3)
    ranks.all[1].peers.breaks_at = breaks_at

    def until_it_breaks(one: ThreadRank) -> bool:
        try:
            one.steps(4)
        except PeersLost:
            one.out()
            return False
        return True

    assert ranks.each(until_it_breaks) == [False, False, False]
    before = own_states(ranks)
    assert relative_difference(before[0], before[1]) > 1e-6
    ranks.group(0, 1, 2)
    expected = weighted(before, [120, 80, 40])
    for one in own_states(ranks):
        assert relative_difference(one, expected) <= 1e-12
    assert ranks.each(lambda one: one.training.finished) == [4, 4, 4]
    assert updates(ranks) == [{4.0}] * 3
    ranks.steps(8)
    assert updates(ranks) == [{8.0}] * 3
    undisturbed = ranks.each(lambda one: one.rank.averaging.averages)
    assert undisturbed == [2, 2, 2]


def test_an_average_that_only_some_completed_counts(made: Made) -> None:
    _, ranks = made(AVERAGING)
    ranks.group(0, 1, 2)
    ranks.steps(6)
    done = ranks.all[1].rank.averaging
    assert done is not None
    done.averages, done.weight = done.averages + 1, 0.0
    before = own_states(ranks)
    ranks.group(0, 1)
    for one in own_states(ranks):
        assert relative_difference(one, before[1]) == 0


def test_lost_rows_of_a_mixed_layout_come_from_the_checkpoint(made: Made) -> None:
    _, ranks = made(MIXED_ROWS)
    ranks.group(0, 1, 2)
    ranks.steps(7)
    ranks.group(0, 1)
    assert ranks.asked_for("back")
    assert ranks.each(lambda one: one.rank.averaging.averages) == [0, 0]
    ranks.steps(24)
