"""The split of a batch: complete, within limits, and as even in time as whole samples allow."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.curves import Affine
from trainwright.tasks.allocate.plan.split import split_batch

curves = st.lists(
    st.builds(Affine, fixed=st.floats(0, 1), per_sample=st.floats(1e-6, 1)), min_size=1, max_size=6
)


@settings(deadline=None)
@given(st.integers(1, 3000), curves, st.data())
def test_the_split_uses_all_samples_and_gives_each_rank_at_least_one_and_at_most_its_limit(
    total: int, devices: list[Affine], data: st.DataObject
) -> None:
    limits = data.draw(
        st.lists(
            st.one_of(st.none(), st.integers(0, 2000)), min_size=len(devices), max_size=len(devices)
        )
    )
    batches = split_batch(total, devices, limits)
    possible = total >= len(devices) and all(limit is None or limit >= 1 for limit in limits)
    possible = possible and sum(total if limit is None else limit for limit in limits) >= total
    assert (batches is not None) == possible
    if batches is not None:
        assert sum(batches) == total
        assert all(
            1 <= batch <= (total if limit is None else limit)
            for batch, limit in zip(batches, limits, strict=True)
        )


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.lists(
        st.builds(Affine, fixed=st.floats(0, 1), per_sample=st.floats(1e-3, 1)),
        min_size=1,
        max_size=3,
    ),
)
def test_no_other_split_finishes_earlier(total: int, devices: list[Affine]) -> None:
    batches = split_batch(total, devices)
    if batches is None:
        assert total < len(devices)
        return

    def finish(split: tuple[int, ...]) -> float:
        return max(curve(batch) for curve, batch in zip(devices, split, strict=True))

    choices = itertools.product(range(1, total + 1), repeat=len(devices))
    best = min(finish(split) for split in choices if sum(split) == total)
    assert finish(tuple(batches)) <= best * (1 + 1e-12)


@settings(deadline=None)
@given(
    st.integers(8, 5000),
    st.lists(
        st.builds(Affine, fixed=st.floats(0, 0.01), per_sample=st.floats(1e-4, 1e-2)),
        min_size=1,
        max_size=8,
    ),
)
def test_the_slowest_rank_is_within_one_sample_of_the_real_valued_optimum(
    total: int, devices: list[Affine]
) -> None:
    batches = split_batch(total, devices)
    assert batches is not None
    level = (total + sum(one.fixed / one.per_sample for one in devices)) / sum(
        1 / one.per_sample for one in devices
    )
    slowest = max(curve(batch) for curve, batch in zip(devices, batches, strict=True))
    least = max(level, max(curve(1) for curve in devices))  # every rank has at least one sample
    assert slowest <= least + max(one.per_sample for one in devices) * (1 + 1e-9)


def test_a_device_twice_as_fast_gets_twice_as_much() -> None:
    assert split_batch(
        96, [Affine(fixed=0, per_sample=1e-3), Affine(fixed=0, per_sample=2e-3)]
    ) == [64, 32]
