"""Calibrations that scale a reference. The machines are made up, with known costs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.fit.cost_fit import ScaledReference, fit_family
from trainwright.estimator.fit.roofline_fit import DevicePrior
from trainwright.estimator.fit.step_fit import StepSample, fit
from trainwright.estimator.measure.measure_reference import measured
from trainwright.estimator.measure.network_timing import ready
from trainwright.estimator.measure.networks.benchmark import networks, turn
from trainwright.estimator.measure.samples import KeptSamples
from trainwright.estimator.measure.sentinel import Sentinel
from trainwright.estimator.predict.calibration import Calibration
from trainwright.estimator.predict.machine_speed import Speed
from trainwright.estimator.predict.op_cost import FamilyCost, OpSample
from trainwright.estimator.predict.reference import references
from trainwright.estimator.predict.step_work import cost_family
from trainwright.estimator.trace.recorder import OperationRecorder

SPEED = Speed(compute_s=1e-3, memory_s=2e-3, calls_s=1e-4)
KINDS = ("aten.mm", "aten.bmm", "aten.addmm")


def _seconds(kind: str, flops: float, width: float) -> float:
    """An operation's time on the reference, which follows no roofline."""
    return 2e-6 + flops / 1e11 * (1 + KINDS.index(kind)) * (1 + 8 / width)


def _other(kind: str, flops: float, width: float) -> float:
    """An operation's time on a machine that is fast where the reference is slow."""
    return 2e-6 + flops / 1e11 * (3 - KINDS.index(kind)) * (1 + width / 8)


def _ops(
    draw: random.Random, count: int, takes: Callable[[str, float, float], float]
) -> tuple[OpSample, ...]:
    made = []
    for _ in range(count):
        kind, flops, width = draw.choice(KINDS), 10 ** draw.uniform(5, 8), 2.0 ** draw.uniform(1, 8)
        made.append(
            OpSample(
                kind=kind,
                family="matmul",
                dtype="float32",
                flops=flops,
                bytes=flops / 20,
                dims={"width": width},
                count=1,
                seconds=takes(kind, flops, width) * math.exp(draw.gauss(0, 0.01)),
            )
        )
    return tuple(made)


def _steps(seed: int, count: int, takes: Callable[[str, float, float], float]) -> list[StepSample]:
    draw, made = random.Random(seed), []
    for number in range(count):
        ops = _ops(draw, 3, takes)
        seconds = 1.1 * sum(one.seconds for one in ops)
        made.append(
            StepSample(
                family=f"f{number % 4}",
                batch_size=8,
                seconds=seconds,
                speed=SPEED,
                ops_speed=SPEED,
                ops=ops,
            )
        )
    return made


def _fit(samples: list[StepSample], *known: Calibration, processor: str = "here") -> Calibration:
    return fit(
        samples,
        known,
        device_type="cpu",
        threads=1,
        dtype="float32",
        torch="2.0.0",
        processor=processor,
        created_at="2026-01-01T00:00:00+00:00",
        duration_s=1.0,
    )


def _error(found: Calibration, takes: Callable[[str, float, float], float]) -> float:
    """The mean error on unseen operations."""
    ops = _ops(random.Random(99), 200, takes)
    cost = found.families["matmul"]
    predicted = _predicted(cost, ops)
    return float(np.abs(np.log(predicted / np.array([one.seconds for one in ops]))).mean())


def _predicted(cost: FamilyCost, ops: tuple[OpSample, ...]) -> np.ndarray:
    flops, moved = (np.array([getattr(one, name) for one in ops]) for name in ("flops", "bytes"))
    widths = np.array([one.dims["width"] for one in ops])
    points = np.log1p(np.column_stack([flops, moved, widths]))
    return np.asarray(cost.predict([one.kind for one in ops], flops, moved, points)[0])


@pytest.fixture(scope="module")
def known() -> Calibration:
    return _fit(_steps(1, 150, _seconds), processor="the reference's")


def test_a_reference_makes_predictions_from_few_networks_better(known: Calibration) -> None:
    def slower(kind: str, flops: float, width: float) -> float:
        return 1.7 * _seconds(kind, flops, width)

    few = _steps(2, 16, slower)
    beside, alone = _fit(few, known), _fit(few)
    assert beside.reference == "the reference's"
    assert alone.reference is None
    assert _error(beside, slower) < 0.5 * _error(alone, slower)


def test_a_reference_of_a_dissimilar_machine_is_not_used(known: Calibration) -> None:
    few = _steps(2, 24, _other)
    beside = _fit(few, known)
    assert beside.reference is None
    assert beside == _fit(few)


@given(factor=st.floats(0.05, 20))
def test_a_machine_that_is_slower_by_one_factor_is_predicted_by_that_factor(
    known: Calibration, factor: float
) -> None:
    cost, ops = known.families["matmul"], _ops(random.Random(5), 20, _seconds)
    there = _predicted(cost, ops)
    here = [
        one.model_copy(update={"seconds": factor * float(s)})
        for one, s in zip(ops, there, strict=True)
    ]
    assert _predicted(
        ScaledReference({"matmul": cost}, here).cost("matmul", here), ops
    ) == pytest.approx(factor * there, rel=1e-6)


def test_one_disturbed_operation_does_not_make_its_family_slower() -> None:
    ops = list(_ops(random.Random(6), 41, _seconds))
    cost = fit_family(ops, DevicePrior("cpu").center("matmul"))
    calm = ScaledReference({"matmul": cost}, ops).cost("matmul", ops)
    ops[3] = ops[3].model_copy(update={"seconds": 100 * ops[3].seconds})
    disturbed = ScaledReference({"matmul": cost}, ops).cost("matmul", ops)
    assert disturbed.roofline.latency_s == pytest.approx(calm.roofline.latency_s, rel=0.05)


def test_the_most_helpful_of_several_references_is_used(known: Calibration) -> None:
    unlike, few = _fit(_steps(3, 150, _other), processor="another's"), _steps(2, 16, _seconds)
    beside = _fit(few, known)
    assert beside.reference == "the reference's"
    assert _fit(few, known, unlike) == _fit(few, unlike, known) == beside


@pytest.mark.parametrize("found", references(), ids=lambda one: one.processor)
def test_the_packaged_references_cover_the_operations_that_calibration_measures(
    found: Calibration,
) -> None:
    assert (found.mode, found.device_type, found.threads, found.dtype) == (
        "calibrated",
        "cpu",
        1,
        "float32",
    )
    assert found.reference is None
    for _, network in zip(turn(), networks(0), strict=False):
        step, recorder = ready(network, 2), OperationRecorder()
        with recorder, recorder.record() as recording:
            step()
        assert {
            cost_family(one.family, one.dims) for one in recording.operations
        } <= found.families.keys(), network


def test_an_interrupted_reference_measurement_continues(tmp_path: Path) -> None:
    sentinel, path = Sentinel(), tmp_path / "samples"
    first = measured(7, 1e-9, KeptSamples(path, "here"), sentinel)
    kept = KeptSamples(path, "here")
    assert measured(7, kept.elapsed_s, kept, sentinel) == first
    assert len(first) == 1
    more = measured(7, kept.elapsed_s + 1e-9, kept, sentinel)
    assert more[:1] == first
    assert len(more) == 2
