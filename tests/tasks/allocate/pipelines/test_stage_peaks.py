"""The simulated peak of a stage, by the schedule's order, what is kept and what is recomputed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from recorded_models import FAMILIES, step_of

from trainwright.estimator.memory.recomputation import StepSimulation
from trainwright.estimator.memory.recompute_choice import RecomputeChoice
from trainwright.estimator.memory.recompute_names import covered
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.trace import trace
from trainwright.tasks.allocate.actions.schedules import in_flight
from trainwright.tasks.allocate.pipelines.stage_peaks import StagePeaks, StageWorkload

_SIZE = 8
_TENSORS = 4
"""of adamw: parameter, gradient, two moments"""


@functools.cache
def _structure(family: str) -> Structure:
    return trace(step_of(family), 2 * _SIZE)


@functools.cache
def _peaks(family: str) -> StagePeaks:
    found = _structure(family)
    step = found.recorded_step()
    assert step is not None
    return StagePeaks(step, [one.facts() for one in found.layer_work], found.units, _TENSORS)


def _stage(family: str, stage: int, stages: int, parts: int, **changes: Any) -> StageWorkload:
    units = len(_structure(family).units)
    what = {
        "first": units * stage // stages,
        "end": units * (stage + 1) // stages,
        "schedule": "gpipe",
        "stage": stage,
        "stages": stages,
        "micro_batches": (_SIZE,) * parts,
    }
    return StageWorkload(**{**what, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_one_stage_with_one_micro_batch_is_the_whole_step(family: str) -> None:
    step = _structure(family).recorded_step()
    assert step is not None
    whole = StepSimulation(step, _SIZE).peak_bytes()
    found = _peaks(family).peak_bytes(_stage(family, 0, 1, 1), "nvidia-t4")
    # It drops the model's outputs after the loss, and its allocator gives whole blocks.
    assert found == pytest.approx(whole, rel=0.15)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stage", [0, 1])
def test_each_micro_batch_in_flight_takes_the_same(family: str, stage: int) -> None:
    peaks = _peaks(family)
    needs = [peaks.peak_bytes(_stage(family, stage, 2, parts), "cpu") for parts in (8, 9, 10)]
    assert needs[2] - needs[1] == pytest.approx(needs[1] - needs[0])
    assert needs[1] > needs[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_schedule_with_fewer_micro_batches_in_flight_needs_less(family: str) -> None:
    peaks, parts = _peaks(family), 8
    by_schedule = {
        schedule: [
            peaks.peak_bytes(_stage(family, stage, 2, parts, schedule=schedule), "cpu")
            for stage in (0, 1)
        ]
        for schedule in ("gpipe", "1f1b", "zero-bubble")
    }
    assert in_flight("1f1b", 2, 1, parts) < in_flight("gpipe", 2, 1, parts)
    for plain, few, late in zip(*by_schedule.values(), strict=True):
        assert few < plain
        assert few <= late * (1 + 1e-9)


@pytest.mark.parametrize("family", ["transformer", "residual"])
def test_a_stage_that_recomputes_what_saves_most_needs_less(family: str) -> None:
    what, structure = _stage(family, 0, 2, 8), _structure(family)
    step = structure.recorded_step()
    assert step is not None
    modules = {one for unit in structure.units for one in unit.modules}
    choice = RecomputeChoice(StepSimulation(step, _SIZE), modules)
    own = {layer for unit in structure.units[what.first : what.end] for layer in unit.layers}
    order = [one.name for one in structure.layer_work]
    inside = [one for one in choice.names if covered([one], order) <= own]
    best = max(inside, key=choice.saved_bytes)
    plain = _peaks(family).peak_bytes(what, "cpu")
    again = _peaks(family).peak_bytes(what, "cpu", [best])
    assert plain - again == pytest.approx(7 * choice.saved_bytes(best), rel=0.2)


def test_uneven_micro_batches_need_no_more_than_the_largest_one() -> None:
    peaks = _peaks("transformer")
    even = peaks.peak_bytes(_stage("transformer", 0, 2, 3), "cpu")
    uneven = _stage("transformer", 0, 2, 3, micro_batches=(_SIZE, _SIZE, _SIZE - 3))
    assert peaks.peak_bytes(uneven, "cpu") < even


def test_a_tied_parameter_counts_on_each_stage_that_uses_it() -> None:
    units, peaks = len(_structure("transformer").units), _peaks("transformer")
    first, last = (peaks.parameter_bytes(*one) for one in ((0, 1), (units - 1, units)))
    whole = peaks.parameter_bytes(0, units)
    rest = peaks.parameter_bytes(1, units)
    embedding = 50 * 32 * 4
    assert first >= embedding
    assert last >= embedding
    assert whole == _structure("transformer").parameter_bytes
    assert first + rest == whole + embedding
