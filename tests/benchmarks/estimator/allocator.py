"""The peak of torch's CPU allocator in a training step, from the profiler's events."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile, record_function
from zoo import Case

_MARK = "the measured step"


def peak_bytes(case: Case) -> float:
    """Peak live bytes in the third step, with the model, the optimizer's state and the batch."""
    return peak_of(case.step)


def peak_of(build: Callable[[], Callable[[], object]]) -> float:
    """Peak live bytes in the third call of what is built, with all that it holds.

    The profiler counts only allocations while it runs, so all is built within it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = build()
        step()
        step()
        with record_function(_MARK):
            step()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    mark = next(one for one in events if one.name() == _MARK)
    started, ended = mark.start_ns(), mark.start_ns() + mark.duration_ns()
    changes = sorted(
        (one.start_ns(), place, one.nbytes())
        for place, one in enumerate(events)
        if one.name() == "[memory]"
    )
    live = peak = 0
    for at, _, size in changes:
        before, live = live, live + size
        if started <= at <= ended:
            peak = max(peak, before, live)
    return float(peak)
