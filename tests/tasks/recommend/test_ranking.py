"""Laws of the order of candidates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.recommend.ranking import AS_GOOD, Contender, ranked

errors = st.one_of(st.none(), st.floats(0.001, 10))


@st.composite
def contenders(draw: st.DrawFn) -> list[Contender]:
    return [
        Contender(
            f"m{place}",
            draw(st.booleans()),
            draw(errors),
            draw(st.floats(0.1, 1000)),
            draw(st.integers(0, 20)),
        )
        for place in range(draw(st.integers(1, 8)))
    ]


@given(contenders())
def test_the_order_has_each_candidate_once_and_those_that_miss_a_limit_last(
    given_ones: list[Contender],
) -> None:
    order = ranked(given_ones)
    assert sorted(one.name for one in order) == sorted(one.name for one in given_ones)
    fits = [one.feasible for one in order]
    assert fits == sorted(fits, reverse=True)


@given(contenders())
def test_the_first_is_as_good_as_the_best_and_spends_least_of_such(
    given_ones: list[Contender],
) -> None:
    order = ranked(given_ones)
    known = [one for one in given_ones if one.feasible and one.error is not None]
    if not known:
        return
    first = order[0]
    assert first.error is not None
    least = min(one.error for one in known if one.error is not None)
    assert first.error <= least * (1 + AS_GOOD)
    good = [one for one in known if one.error is not None and one.error <= least * (1 + AS_GOOD)]
    assert first.spend == min(one.spend for one in good)


@given(contenders())
def test_candidates_beyond_the_best_come_by_error_and_unknown_ones_after_them(
    given_ones: list[Contender],
) -> None:
    fit = [one for one in ranked(given_ones) if one.feasible]
    known = [one.error for one in fit if one.error is not None]
    assert [one.error is None for one in fit] == sorted(one.error is None for one in fit)
    if known:
        worse = [error for error in known if error > min(known) * (1 + AS_GOOD)]
        assert worse == sorted(worse)
        assert known[len(known) - len(worse) :] == worse


@given(contenders(), st.randoms())
def test_the_order_does_not_depend_on_that_of_the_candidates(
    given_ones: list[Contender], random: object
) -> None:
    mixed = list(given_ones)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert ranked(mixed) == ranked(given_ones)
