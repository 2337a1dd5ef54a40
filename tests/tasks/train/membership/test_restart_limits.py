from __future__ import annotations

import pytest

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.membership.restart_limits import FruitlessGroups, RestartLimits


def test_a_device_is_abandoned_after_its_restarts_unless_it_reaches_a_checkpoint() -> None:
    limits = RestartLimits(restarts=2)
    for _ in range(2):
        limits.died(1)
    assert limits.allows(1)
    limits.reached_checkpoint([0, 1])
    for _ in range(3):
        limits.died(1)
    assert not limits.allows(1)
    limits.reached_checkpoint([0])
    assert not limits.allows(1)
    assert limits.allows(0)


def test_an_error_counts_as_repeated_only_at_the_same_step() -> None:
    limits = RestartLimits(restarts=2)
    assert not limits.repeats(3)
    assert not limits.repeats(4)
    assert limits.repeats(3)


def test_an_error_is_forgotten_after_a_checkpoint() -> None:
    limits = RestartLimits(restarts=2)
    assert not limits.repeats(3)
    limits.reached_checkpoint([0])
    assert not limits.repeats(3)


def test_after_a_fruitless_group_the_next_one_waits_a_second() -> None:
    groups = FruitlessGroups(patience_s=60.0)
    assert groups.allow_next(1, 10.0, fruitful=True, kept=False)
    assert not groups.allow_next(2, 11.0, fruitful=False, kept=False)
    assert not groups.allow_next(2, 11.9, fruitful=False, kept=False)
    assert groups.allow_next(2, 12.0, fruitful=False, kept=False)
    assert groups.allow_next(3, 12.1, fruitful=True, kept=False)


@pytest.mark.parametrize("kept", [True, False])
def test_too_many_fruitless_groups_in_a_row_raise_the_ranks_error(
    kept: bool,
) -> None:
    groups = FruitlessGroups(patience_s=3.0)
    groups.sum_error = "no route"
    for generation in (1, 2, 3):
        groups.allow_next(generation, 10.0 + generation, fruitful=False, kept=kept)
    with pytest.raises(
        TrainingFailed, match="failed 4 times in a row, and no rank was lost: no r"
    ) as error:
        groups.allow_next(4, 14.0, fruitful=False, kept=kept)
    assert str(error.value).endswith("the last checkpoint is kept") == kept


def test_a_fruitful_group_resets_the_count() -> None:
    groups = FruitlessGroups(patience_s=0.0)
    for generation in range(1, 20, 2):
        groups.allow_next(generation, 10.0, fruitful=False, kept=False)
        assert groups.allow_next(generation + 1, 10.0, fruitful=True, kept=False)
