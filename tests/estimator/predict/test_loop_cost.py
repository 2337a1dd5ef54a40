"""The training loop's time on top of a model's step: fitted, and added to a curve."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.curves import Affine, DeviceCurve, Knots
from trainwright.estimator.predict.loop_cost import (
    LoopCost,
    LoopWork,
    fit_loop,
    in_training,
    loop_work,
)
from trainwright.estimator.predict.machine_speed import MOST_LINEAR_DRIFT, at_another_time
from trainwright.estimator.structure import Layer, Operation, Structure

COST = LoopCost(
    step_s=1e-3,
    tensor_s=2e-5,
    gradient_byte_s=1e-9,
    input_byte_s=1e-10,
    norm_s=3e-4,
    norm_byte_s=2e-9,
)
SIZES = (8, 16, 32)


def _structure(**changes: object) -> Structure:
    """Two layers, and a batch normalisation of 400 bytes a sample that runs three times a step."""
    norm = Operation(
        kind="aten.native_batch_norm",
        family="norm",
        count=3,
        flops=Affine(fixed=0, per_sample=1),
        bytes=Affine(fixed=0, per_sample=800),
    )
    layers = [
        Layer(
            name=str(number),
            kind="Linear",
            output_shape=(32, 4),
            parameters=parameters,
            forward_flops=1.0,
        )
        for number, parameters in enumerate((500, 500, 0))
    ]
    facts = {
        "batch_size": 32,
        "optimizer": "adamw",
        "precision": "fp32",
        "method": "fake tensors",
        "parameters": 1000,
        "parameter_bytes": 4000,
        "parameter_tensors": 5,
        "forward_flops_per_sample": 1.0,
        "activation_bytes_per_sample": 1.0,
        "idle_bytes": Affine(fixed=9000, per_sample=100),
        "peak_memory_bytes": Affine(fixed=1, per_sample=1),
        "layers": layers,
        "features": {},
        "operations": {},
        "trace": [norm],
    }
    return Structure.model_validate(facts | changes)


def _curve(cores: float | None) -> DeviceCurve:
    return DeviceCurve(
        device_type="cpu",
        cores=cores,
        mode="calibrated",
        coverage=1.0,
        step_time_s=Affine(fixed=0.01, per_sample=0.001),
        time_knots=Knots(sizes=SIZES, values=tuple(0.01 + 0.001 * size for size in SIZES)),
        low_factor=0.8,
        high_factor=1.2,
        peak_memory_bytes=Affine(fixed=1.0, per_sample=1.0),
    )


def test_the_work_is_counted_from_the_structure() -> None:
    assert loop_work(_structure(), 10) == LoopWork(1.0, 5.0, 4000.0, 1000.0, 3.0, 12_000.0)


def test_without_a_count_a_layer_has_two_parameters() -> None:
    assert loop_work(_structure(parameter_tensors=None), 10).tensors == 4


@settings(deadline=None)
@given(
    batch_size=st.integers(1, 64),
    cores=st.sampled_from([None, 0.25, 0.5, 1.0, 4.0]),
    after_sum_s=st.sampled_from([0.0, 1e-3]),
)
def test_the_loops_cost_is_added_to_the_curve_and_grows_on_a_share_of_a_core(
    batch_size: int, cores: float | None, after_sum_s: float
) -> None:
    before, structure = _curve(cores), _structure()
    after = in_training(before, structure, COST, after_sum_s)
    slower = max(1.0, 1 / (cores or 1.0))
    added = slower * COST(loop_work(structure, batch_size)) + after_sum_s
    assert after.median_s(batch_size) - before.median_s(batch_size) == pytest.approx(added)
    assert after.loop_part_s(batch_size) == pytest.approx(added)
    assert before.loop_part_s(batch_size) is None


@given(st.floats(0.0, MOST_LINEAR_DRIFT))
def test_an_interval_grows_by_the_machines_drift(drift: float) -> None:
    before = _curve(None)
    after = at_another_time(before, drift)
    assert after.median_s(8) == before.median_s(8)
    assert after.high_factor >= before.high_factor
    assert after.low_factor <= before.low_factor
    # The variances of the logarithm add up; the drift's is (drift / (p90 - p10))².
    normal = NormalDist()
    drifted = normal.inv_cdf(0.95) * drift / (2 * normal.inv_cdf(0.9))
    wanted = math.log(before.high_factor) ** 2 + drifted**2
    assert math.log(after.high_factor) ** 2 == pytest.approx(wanted)


@given(st.floats(2.0, 1000.0))
def test_on_a_busy_machine_an_interval_covers_most_of_the_speeds_that_were_seen(
    drift: float,
) -> None:
    """From p10 = median to p90 = (1 + drift) · median, of which a normal's 90 % is 1.28 / 2."""
    after = at_another_time(_curve(None), drift)
    assert after.high_factor >= (1 + drift) ** 0.64
    assert after.low_factor <= (1 + drift) ** -0.64
    assert after.speed_drift == drift


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=6))
def test_the_fit_recovers_the_cost_that_made_the_times(factors: list[float]) -> None:
    pairs = zip(COST.model_dump().items(), factors, strict=True)
    cost = LoopCost(**{name: value * factor for (name, value), factor in pairs})
    works = [
        LoopWork(1, 2, 8, 500, 0, 0),
        LoopWork(1, 50, 1e4, 500, 0, 0),
        LoopWork(1, 6, 4e6, 500, 0, 0),
        LoopWork(1, 2, 8, 4e6, 0, 0),
        LoopWork(1, 26, 1e3, 500, 12, 2e4),
        LoopWork(1, 8, 6e5, 500, 2, 8e6),
    ]
    found = fit_loop([(work, cost(work)) for work in works])
    for work in works:
        assert found(work) == pytest.approx(cost(work), rel=1e-3)


def test_a_fit_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no time"):
        fit_loop([(LoopWork(1, 2, 8, 500, 0, 0), 0.0)])
