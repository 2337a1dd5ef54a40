"""The laws of the queue's order: no run starves, and none is delayed by a run behind it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.leases.queue_order import Holding, Waiter, available, in_order, to_revoke

AGE_S = 10.0
DEVICES = [f"device {number}" for number in range(5)]
wishes = st.sets(st.sampled_from(DEVICES), min_size=1)


def waiter(
    run: str, priority: int = 0, at: float = 0.0, wanted: set[str] | None = None, **more: object
) -> Waiter:
    names = frozenset(wanted or DEVICES)
    values = {"deadline_at": None, "needed": 1, **more}
    return Waiter(run=run, holder=run, priority=priority, enqueued_at=at, wanted=names, **values)  # type: ignore[arg-type]


arrivals = st.lists(
    st.tuples(
        st.integers(-5, 5), st.one_of(st.none(), st.floats(0, 500)), st.floats(0, 200), wishes
    ),
    min_size=1,
    max_size=12,
)


def queue(drawn: list[tuple[int, float | None, float, set[str]]]) -> list[Waiter]:
    return [
        waiter(f"run {number}", priority, at, wanted, deadline_at=deadline)
        for number, (priority, deadline, at, wanted) in enumerate(drawn)
    ]


def test_priority_goes_first_then_deadline_then_arrival() -> None:
    late = waiter("late", at=3)
    early = waiter("early", at=1)
    urgent = waiter("urgent", at=4, deadline_at=50)
    important = waiter("important", priority=1, at=5)
    assert in_order([late, early, urgent, important], 6, AGE_S) == [important, urgent, early, late]


@given(arrivals, st.floats(200, 2000))
def test_a_run_that_arrives_late_enough_stays_behind_at_any_priority(
    drawn: list[tuple[int, float | None, float, set[str]]], now: float
) -> None:
    waiting = queue(drawn)
    ordered = in_order(waiting, now, AGE_S)
    for one in waiting:
        for other in waiting:
            margin = (max(0, other.priority - one.priority) + 1) * AGE_S
            if other.enqueued_at > one.enqueued_at + margin:
                assert ordered.index(other) > ordered.index(one)


@given(arrivals, wishes)
def test_a_run_takes_no_device_that_a_run_ahead_wants(
    drawn: list[tuple[int, float | None, float, set[str]]], taken: set[str]
) -> None:
    ordered = in_order(queue(drawn), 300, AGE_S)
    for place, one in enumerate(ordered):
        found = available(one.wanted, ordered[:place], taken)
        assert found <= one.wanted - taken
        for ahead in ordered[:place]:
            before = available(ahead.wanted, ordered[: ordered.index(ahead)], taken)
            assert available(ahead.wanted, ordered[: ordered.index(ahead)], taken | found) == before


@given(st.data())
def test_a_run_starts_in_bounded_time_despite_a_stream_of_higher_priorities(
    data: st.DataObject,
) -> None:
    """Simulated clock: one device, jobs of 3 s, one run of higher priority per second."""
    priority = data.draw(st.integers(0, 4))
    patient = waiter("patient", 0, 0.0, {DEVICES[0]})
    waiting, busy_until = [patient], 0.0
    for now in range(2000):
        waiting.append(waiter(f"run {now}", priority, float(now), {DEVICES[0]}))
        if now >= busy_until:
            first = in_order(waiting, now, AGE_S)[0]
            waiting.remove(first)
            busy_until = now + 3.0
            if first is patient:
                break
    # All runs that arrived within (priority + 1) ages may go first, at 3 s each.
    assert patient not in waiting
    assert now <= ((priority + 1) * AGE_S + 2) * 3 + 3


def test_preemption_takes_the_fewest_runs_of_the_lowest_priority_or_none_if_all_are_too_few() -> (
    None
):
    held = [
        Holding("a", 0, 1, frozenset(DEVICES[:2])),
        Holding("b", 1, 2, frozenset(DEVICES[2:3])),
        Holding("c", 5, 3, frozenset(DEVICES[3:])),
    ]
    assert [one.run for one in to_revoke(waiter("w", 3, needed=2), [], held)] == ["a"]
    assert [one.run for one in to_revoke(waiter("w", 3, needed=3), [], held)] == ["a", "b"]
    assert to_revoke(waiter("w", 3, needed=4), [], held) == []
    assert to_revoke(waiter("w", 0, needed=1), [], held) == []
    assert to_revoke(waiter("w", 3, needed=1), [waiter("ahead", 9)], held) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["a", "b", "c", "d", "e", None])),
        min_size=8,
        max_size=8,
    ),
    st.integers(1, 8),
    st.integers(0, 5),
)
def test_no_unnecessary_run_is_preempted(
    drawn: list[tuple[int, str | None]], needed: int, priority: int
) -> None:
    names = [f"device {number}" for number in range(len(drawn))]
    holders = {run for _, run in drawn if run}
    held = [
        Holding(
            run,
            min(level for level, other in drawn if other == run),
            number,
            frozenset(name for name, (_, other) in zip(names, drawn, strict=True) if other == run),
        )
        for number, run in enumerate(sorted(holders))
    ]
    asks = waiter("w", priority, wanted=set(names), needed=needed)
    free = sum(run is None for _, run in drawn)
    chosen = to_revoke(asks, [], held)
    gains = [len(one.resources) for one in chosen]
    assert all(one.priority < priority for one in chosen)
    if not chosen:
        below = sum(len(one.resources) for one in held if one.priority < priority)
        assert free >= needed or free + below < needed
    for gain in gains:
        assert free + sum(gains) >= needed > free + sum(gains) - gain


@pytest.mark.parametrize("priority", [0, 5])
def test_a_long_wait_does_not_let_a_run_preempt_its_equals(priority: int) -> None:
    held = [Holding("a", priority, 1, frozenset(DEVICES))]
    assert to_revoke(waiter("w", priority, at=-1e9), [], held) == []
