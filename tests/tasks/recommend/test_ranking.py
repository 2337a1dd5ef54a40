"""Laws of the order of candidates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.recommend.ranking import AS_GOOD, Contender, ranked, ranked_by_rows

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
def test_accuracy_comes_first_cost_only_for_equal_errors_and_unknown_errors_after_them(
    given_ones: list[Contender],
) -> None:
    fit = [one for one in ranked(given_ones) if one.feasible]
    known = [(one.error, one.spend) for one in fit if one.error is not None]
    assert [one.error is None for one in fit] == sorted(one.error is None for one in fit)
    assert known == sorted(known)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.001, 1), min_size=1),
    st.lists(st.floats(1, 100), min_size=4, max_size=4),
    st.sets(st.sampled_from("abcd")),
)
def test_after_a_comparison_on_rows_cost_decides_among_those_that_it_cannot_tell_apart(
    errors: dict[str, float], spent: list[float], worse: set[str]
) -> None:
    spend = dict(zip("abcd", spent, strict=True))
    order = ranked_by_rows(errors, spend, lambda best, name: name in worse)
    assert sorted(order) == sorted(errors)
    least = min(errors.values())
    best = min(errors, key=lambda name: (errors[name], spend[name], name))
    equal = [
        name
        for name in errors
        if name == best or (name not in worse and errors[name] <= least * (1 + AS_GOOD))
    ]
    assert set(order[: len(equal)]) == set(equal)
    assert spend[order[0]] == min(spend[name] for name in equal)
    rest = [errors[name] for name in order[len(equal) :]]
    assert rest == sorted(rest)


@given(contenders(), st.randoms())
def test_the_order_does_not_depend_on_that_of_the_candidates(
    given_ones: list[Contender], random: object
) -> None:
    mixed = list(given_ones)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert ranked(mixed) == ranked(given_ones)
