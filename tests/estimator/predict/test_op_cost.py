"""The cost of operations. The samples have known costs, which the fit must find."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from pydantic import ValidationError

from trainwright.estimator.fit.cost_fit import fit_families, fit_family
from trainwright.estimator.fit.roofline_fit import DevicePrior
from trainwright.estimator.predict.op_cost import FamilyCost, Kernel, OpSample, Roofline, times
from trainwright.estimator.predict.step_work import by_family, cost_family

PRIOR = DevicePrior("cpu")
CENTER = PRIOR.center("matmul")
TRUTH = Roofline(latency_s=2e-6, flops_per_s=1e11, bytes_per_s=1e10)


def _sample(
    kind: str, flops: float, moved: float, width: float, seconds: float, family: str = "matmul"
) -> OpSample:
    return OpSample(
        kind=kind,
        family=family,
        dtype="float32",
        flops=flops,
        bytes=moved,
        dims={"width": width},
        count=1,
        seconds=seconds,
    )


def _samples(count: int = 150, slow: float = 3.0) -> list[OpSample]:
    """Two kinds of operations: one is `slow` times slower, and narrow ones are slower still."""
    draw, made = random.Random(1), []
    for number in range(count):
        kind = ("aten.fast", "aten.slow")[number % 2]
        flops, width = 10 ** draw.uniform(4, 9), 2.0 ** draw.randint(2, 8)
        seconds = (
            float(TRUTH(flops, flops / 50))
            * (slow if kind == "aten.slow" else 1.0)
            * (1 + 4 / width)
        )
        made.append(
            _sample(kind, flops, flops / 50, width, seconds * math.exp(draw.gauss(0, 0.03)))
        )
    return made


def _predicted(family: str, samples: list[OpSample], costs: dict[str, object]) -> np.ndarray:
    rows = [(one.family, one.kind, one.count, one.flops, one.bytes, one.dims) for one in samples]
    (work,) = by_family(rows).values()
    return np.asarray(times(costs, family, work)[0])  # type: ignore[arg-type]


def test_differences_of_kinds_and_sizes_from_the_roofline_are_learned() -> None:
    known, unseen = _samples()[:120], _samples()[120:]
    predicted = _predicted("matmul", unseen, fit_families(known, PRIOR))
    errors = np.abs(predicted / np.array([one.seconds for one in unseen]) - 1)
    assert np.median(errors) < 0.08
    assert errors.max() < 0.4


def test_far_from_all_samples_the_cost_is_the_roofline() -> None:
    cost = fit_family(_samples(), CENTER)
    far = np.full((1, 3), 1e4)
    flops = np.array([1e18])
    seconds, deviation = cost.predict(["aten.else"], flops, flops, far)
    assert seconds[0] == pytest.approx(float(cost.roofline(flops, flops)[0]), rel=0.05)
    assert deviation[0] == pytest.approx(
        math.hypot(cost.kernel.family_sigma, cost.kernel.kind_sigma), rel=0.01
    )


def test_uncertainty_grows_with_the_distance_from_samples() -> None:
    cost = fit_family(_samples(), CENTER)
    seen = np.array(cost.points[:1])
    ones = np.array([1e6])
    deviations = [
        float(cost.predict(kinds, ones, ones, seen + off)[1][0])
        for kinds, off in (
            (cost.kinds[:1], 0.0),
            (cost.kinds[:1], 1.0),
            (cost.kinds[:1], 9.0),
            (["aten.else"], 9.0),
        )
    ]
    assert deviations == sorted(deviations)
    assert deviations[0] < deviations[2]


def test_grouped_convolutions_have_their_own_cost() -> None:
    assert cost_family("conv", {"groups": 8.0}) != cost_family("conv", {"groups": 1.0}) == "conv"


def test_an_unknown_family_costs_the_same_as_the_roofline_of_elementwise_operations() -> None:
    samples = [
        _sample("aten.add", 0.0, one.bytes, 8.0, one.bytes / 1e10 + 1e-6, "elementwise")
        for one in _samples(40)
    ]
    costs = {"elementwise": fit_family(samples, PRIOR.center("elementwise"))}
    strange = [_sample("aten.fft", 0.0, 1e8, 8.0, 0.0, "other")]
    assert _predicted("other", strange, costs)[0] == pytest.approx(1e-2, rel=0.2)


def test_the_fit_is_deterministic_and_similar_samples_count_as_one() -> None:
    samples = _samples(40)
    assert fit_family(samples, CENTER) == fit_family(samples, CENTER)
    assert len(fit_family([*samples, *samples], CENTER).points) == len(
        fit_family(samples, CENTER).points
    )


def test_thinning_keeps_all_samples_of_a_rare_kind() -> None:
    rare = [
        _sample("aten.fast", 1.6**number, 1.0, 8.0, float(TRUTH(1.6**number, 1.0)))
        for number in range(40)
    ]
    draw = random.Random(2)
    frequent = [
        _sample(
            "aten.slow",
            10 ** draw.uniform(2, 12),
            10 ** draw.uniform(2, 12),
            8.0,
            draw.uniform(1e-6, 1e-3),
        )
        for _ in range(2000)
    ]
    kinds = fit_family([*frequent, *rare], CENTER).kinds
    assert kinds.count("aten.fast") == len(rare)
    assert 400 < kinds.count("aten.slow") < 800


@pytest.mark.parametrize(
    "change",
    [{"latency_s": -1.0}, {"flops_per_s": 0.0}, {"bytes_per_s": 1e-300}, {"latency_s": 1e300}],
)
def test_an_impossible_stored_cost_is_refused_but_a_fit_may_try_it(
    change: dict[str, float],
) -> None:
    line = Roofline(**{"latency_s": 1e-5, "flops_per_s": 1e10, "bytes_per_s": 1e10, **change})
    kernel = Kernel(
        lengths=(1.0, 1.0), family_sigma=403.4, kind_sigma=403.4, noise=403.4
    )  # as far as the search goes
    possible = Roofline(latency_s=1e-5, flops_per_s=1e10, bytes_per_s=1e10)
    assert FamilyCost(roofline=possible, dims=(), kernel=kernel, kinds=(), points=(), weights=())
    with pytest.raises(ValidationError):
        FamilyCost(roofline=line, dims=(), kernel=kernel, kinds=(), points=(), weights=())
