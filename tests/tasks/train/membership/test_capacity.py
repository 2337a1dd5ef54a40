from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.train.membership.capacity import TrainingCapacity
from trainwright.tasks.train.membership.event import MemoryShortage


@given(
    batch=st.integers(1, 10_000),
    fits=st.integers(0, 10_000),
    predicted=st.none() | st.integers(0, 10_000),
)
def test_each_memory_shortage_shrinks_the_batch(
    batch: int, fits: int, predicted: int | None
) -> None:
    limit = TrainingCapacity([batch], min_count=1).limit(0, MemoryShortage(batch, fits), predicted)
    assert 0 <= limit < batch
    assert limit <= max(fits, batch // 2)


def test_a_limit_is_a_batch_that_fitted_or_the_plans_prediction_but_at_most_half() -> None:
    capacity = TrainingCapacity([64], min_count=1)
    assert capacity.limit(0, MemoryShortage(64), None) == 32
    assert capacity.limit(0, MemoryShortage(64), 20) == 20
    assert capacity.limit(0, MemoryShortage(64), 60) == 32
    assert capacity.limit(0, MemoryShortage(64, fits=50), 20) == 50
    assert capacity.limit(0, MemoryShortage(64, fits=64), None) == 32


def test_a_shortage_names_its_cause() -> None:
    capacity = TrainingCapacity([8, 8, 8], min_count=2)
    assert capacity.shortage([0, 1]) is None
    assert capacity.shortage([]) == "none of 3 devices is left"
    assert capacity.shortage([2]) == "1 of 3 devices left, and devices.min_count is 2"
    for number in (0, 1):
        capacity.limit(number, MemoryShortage(4), None)
    assert capacity.shortage([0, 1]) == (
        "the global batch of 24 does not fit into the memory of 2 of 3 devices "
        "(at most device 0: 2, device 1: 2); --set train.global_batch_size=4"
    )
    assert capacity.shortage([0, 2]) is None


def test_a_device_too_small_for_one_sample_is_unusable_for_lack_of_memory() -> None:
    capacity = TrainingCapacity([8, 8], min_count=2)
    assert not capacity.lacks_memory([0, 1])
    capacity.limit(1, MemoryShortage(1), None)
    assert capacity.usable([1, 0]) == [0]
    assert capacity.lacks_memory([0, 1])
    assert not capacity.lacks_memory([0])


def test_requiring_more_devices_than_exist_is_refused() -> None:
    assert TrainingCapacity([8], min_count=3).shortage([0]) is None
