"""The modules chosen for recomputation: within the cap, and the cheapest of all choices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_models import FAMILIES, chain_step, step_of

from trainwright.estimator.memory.recomputation import StepSimulation
from trainwright.estimator.memory.recompute_choice import RecomputeChoice
from trainwright.estimator.memory.recompute_names import covered
from trainwright.estimator.trace.trace import trace

_BATCH = 64


@functools.cache
def _choice(family: str) -> RecomputeChoice:
    step = trace(step_of(family), 16).recorded_step()
    assert step is not None
    return RecomputeChoice(StepSimulation(step, _BATCH))


def _all_choices(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every set of modules of which none is inside another one."""
    for count in range(len(names) + 1):
        for some in itertools.combinations(names, count):
            if not any(one.startswith(f"{two}.") for one in some for two in some):
                yield some


@functools.cache
def _peaks(family: str) -> dict[tuple[str, ...], float]:
    choice = _choice(family)
    return {some: choice.peak_bytes(some) for some in _all_choices(choice.names)}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(share=st.floats(0.05, 1.0), data=st.data())
def test_no_choice_within_the_cap_is_much_cheaper(
    family: str, share: float, data: st.DataObject
) -> None:
    choice, peaks = _choice(family), _peaks(family)
    seconds = {name: data.draw(st.floats(0.1, 10.0)) for name in choice.names}
    least = min(peaks.values())
    cap = least + share * (choice.plain_bytes - least)
    cheapest = min(
        sum(seconds[name] for name in some) for some, peak in peaks.items() if peak <= cap
    )
    found = choice.cheapest(cap, seconds)
    assert found is not None
    assert found.peak_bytes <= cap
    assert sum(seconds[name] for name in found.names) <= 1.1 * cheapest


@pytest.mark.parametrize("family", FAMILIES)
def test_the_leanest_choice_has_the_smallest_peak(family: str) -> None:
    found, peaks = _choice(family).leanest(), _peaks(family)
    assert found.peak_bytes == pytest.approx(min(peaks.values()), rel=0.01)


def test_a_cap_below_the_smallest_peak_has_no_choice() -> None:
    choice = _choice("transformer")
    seconds = dict.fromkeys(choice.names, 1.0)
    assert choice.cheapest(0.5 * choice.leanest().peak_bytes, seconds) is None


def test_nothing_is_recomputed_if_the_step_fits() -> None:
    choice = _choice("transformer")
    found = choice.cheapest(choice.plain_bytes, dict.fromkeys(choice.names, 1.0))
    assert found is not None
    assert found.names == ()


@functools.cache
def _chain(*, runs: bool) -> RecomputeChoice:
    structure = trace(chain_step(), 256)
    step = structure.recorded_step()
    assert step is not None
    modules = {one for unit in structure.units for one in unit.modules}
    return RecomputeChoice(StepSimulation(step, 4096), modules if runs else ())


def _layers_in(name: str) -> float:
    layers = [f"blocks.{block}.{layer}" for block in range(12) for layer in range(4)]
    return float(len(covered([name], ["enter", *layers, "out"])))


def test_runs_of_modules_need_less_memory_than_each_alone() -> None:
    alone, together = _chain(runs=False).leanest(), _chain(runs=True).leanest()
    assert together.peak_bytes < 0.9 * alone.peak_bytes
    assert any(".." in name for name in together.names)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8])
def test_with_runs_no_cap_costs_more(share: float) -> None:
    """Every cap that modules alone can keep costs about as much or less with runs among them."""
    alone, together = _chain(runs=False), _chain(runs=True)
    least = alone.leanest().peak_bytes
    cap = least + share * (alone.plain_bytes - least)

    def cost(choice: RecomputeChoice) -> float:
        counts = {name: _layers_in(name) for name in choice.names}
        found = choice.cheapest(cap, counts)
        assert found is not None
        assert found.peak_bytes <= cap
        return sum(counts[name] for name in found.names)

    assert cost(together) <= 1.05 * cost(alone)
