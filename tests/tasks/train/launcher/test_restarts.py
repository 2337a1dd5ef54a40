from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.train.batch.sampling import split_among
from trainwright.tasks.train.launcher.restarts import Fleet
from trainwright.tasks.train.record.journal import FOLDER, journal_of
from trainwright.tasks.train.record.metrics import Rows, read_rows

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(weights=WEIGHTS, total=st.integers(1, 500), data=st.data())
def test_the_members_share_the_whole_batch_within_their_limits(
    weights: list[int], total: int, data: st.DataObject
) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, len(weights) - 1), min_size=1)))
    limits = data.draw(st.dictionaries(st.sampled_from(members), st.integers(0, 300)))
    split = split_among(total, members, weights, limits)
    held = [limits.get(number, total) for number in members]
    if sum(min(limit, total) for limit in held) < total:
        assert split is None
    else:
        assert split is not None
        assert sum(split) == total
        assert all(split[number] <= limit for number, limit in zip(members, held, strict=True))
        assert all(split[number] == 0 for number in set(range(len(weights))) - set(members))


@given(weights=WEIGHTS, factor=st.integers(1, 9))
def test_without_limits_the_split_follows_the_weights(weights: list[int], factor: int) -> None:
    total = sum(weights) * factor
    split = split_among(total, range(len(weights)), weights)
    assert split is not None
    assert all(
        abs(size - weight * factor) <= len(weights)
        for size, weight in zip(split, weights, strict=True)
    )


@given(
    batch=st.integers(1, 10_000),
    fits=st.integers(0, 10_000),
    predicted=st.none() | st.integers(0, 10_000),
)
def test_each_time_that_memory_is_short_the_batch_shrinks(
    batch: int, fits: int, predicted: int | None
) -> None:
    fleet = Fleet([batch], min_count=1, restarts=0)
    limit = fleet.no_memory_for(0, batch, fits, predicted)
    assert 0 <= limit < batch
    assert limit <= max(fits, batch // 2)


def test_a_device_is_given_up_after_its_restarts_unless_it_sees_a_checkpoint_through() -> None:
    fleet = Fleet([8, 8], min_count=1, restarts=2)
    for _ in range(2):
        fleet.died(1)
    assert fleet.may_restart(1)
    fleet.reached_checkpoint([0, 1])
    for _ in range(3):
        fleet.died(1)
    assert not fleet.may_restart(1)
    fleet.reached_checkpoint([0])
    assert not fleet.may_restart(1)
    assert fleet.may_restart(0)


def test_an_error_is_a_repetition_only_at_its_own_step() -> None:
    fleet = Fleet([8, 8], min_count=1, restarts=2)
    assert not fleet.repeats(3)
    assert not fleet.repeats(4)
    assert fleet.repeats(3)


def test_who_takes_the_place_of_a_killed_rank_finds_its_whole_rows(tmp_path: Path) -> None:
    store, journal = FolderStore(tmp_path / "run"), journal_of(tmp_path, 1)
    killed = Rows(store, "steps-rank1", journal)
    for step in range(4):
        killed.add(step=step, loss=1 / (step + 3))
    with (tmp_path / FOLDER / "steps-rank1.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut short
    after = Rows(store, "steps-rank1", journal)
    after.recover()
    after.forget_from(3)
    after.add(step=3, loss=0.5)
    after.write()
    assert read_rows(store, "steps-rank1") == [
        *({"step": step, "loss": 1 / (step + 3)} for step in range(3)),
        {"step": 3, "loss": 0.5},
    ]
    third = Rows(store, "steps-rank1", journal)
    third.recover()
    assert (third.waiting, third.newest) == ([], 3)
