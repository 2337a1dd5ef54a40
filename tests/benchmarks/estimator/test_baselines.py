"""Each baseline recovers the law that made its steps, or computes its published formula."""

from __future__ import annotations

import random

import pytest
from baselines import (
    MeasuredStep,
    Totals,
    datasheet_roofline,
    fit_regression,
    fit_totals,
    torch_roofline,
    totals,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import Operation, Structure


def operation(kind: str, family: str, count: int, flops: float, moved: float) -> Operation:
    """Cost in proportion to the batch."""
    lines = [Affine(fixed=0.0, per_sample=one) for one in (flops, moved)]
    dims = {"given": Affine(fixed=0.0, per_sample=1.0)}
    return Operation(
        kind=kind, family=family, count=count, flops=lines[0], bytes=lines[1], dims=dims
    )


def structure(*trace: Operation, **features: float) -> Structure:
    """A step of these operations."""
    line = Affine(fixed=0.0, per_sample=0.0)
    return Structure(
        batch_size=8,
        optimizer="sgd",
        precision="fp32",
        method="fake tensors",
        parameters=1,
        parameter_bytes=4,
        forward_flops_per_sample=0.0,
        activation_bytes_per_sample=0.0,
        peak_memory_bytes=line,
        layers=[],
        features=features,
        operations={},
        trace=list(trace),
    )


CONV = operation("aten.convolution", "conv", 2, 1e6, 1e3)
ADD = operation("aten.add", "elementwise", 5, 0.0, 4e3)
VIEW = operation("aten.view", "view", 7, 0.0, 0.0)


def drawn(seed: int) -> list[tuple[Structure, int]]:
    """Steps of all sizes."""
    draw = random.Random(seed)
    return [
        (
            structure(
                operation(
                    "aten.mm",
                    "matmul",
                    draw.randint(1, 9),
                    10 ** draw.uniform(4, 8),
                    10 ** draw.uniform(3, 6),
                ),
                operation(
                    "aten.add", "elementwise", draw.randint(1, 400), 0.0, 10 ** draw.uniform(2, 5)
                ),
                conv_layers=draw.randint(0, 5),
                filters=draw.randint(0, 300),
                dense_layers=draw.randint(1, 4),
                dense_widths=draw.randint(10, 900),
                image_height=draw.randint(8, 64),
                image_width=draw.randint(8, 64),
            ),
            draw.randint(1, 128),
        )
        for _ in range(30)
    ]


def test_totals_are_sums_over_all_calls_of_operations() -> None:
    assert totals(structure(CONV, ADD, VIEW), 10) == Totals(
        flops=2e7, bytes=2e4 + 2e5, operations=14
    )


@settings(deadline=None)  # the first call loads scipy
@given(
    seed=st.integers(0, 100),
    flop_s=st.floats(1e-12, 1e-9),
    byte_s=st.floats(1e-11, 1e-8),
    call_s=st.floats(1e-7, 1e-4),
)
def test_fit_totals_recovers_a_weighted_sum(
    seed: int, flop_s: float, byte_s: float, call_s: float
) -> None:
    def law(one: Structure, size: int) -> float:
        whole = totals(one, size)
        return whole.flops * flop_s + whole.bytes * byte_s + whole.operations * call_s

    predict = fit_totals([MeasuredStep(one, size, law(one, size)) for one, size in drawn(seed)])
    for one, size in drawn(seed + 1):
        assert predict(one, size) == pytest.approx(law(one, size), rel=1e-3)


def test_fitted_weights_are_never_negative() -> None:
    steps = [
        MeasuredStep(structure(CONV, ADD), size, 1.0 / size) for size in (1, 2, 4, 8)
    ]  # quicker with a larger batch
    predict = fit_totals(steps)
    assert 0 <= predict(structure(CONV, ADD), 1) <= predict(structure(CONV, ADD), 1000)


def test_half_of_the_fitted_steps_take_longer_than_predicted() -> None:
    draw = random.Random(1)
    steps = [
        MeasuredStep(one, size, totals(one, size).flops * 1e-10 * 10 ** draw.uniform(-1, 1))
        for one, size in drawn(0)
    ]
    predict = fit_totals(steps)
    longer = sum(one.seconds > predict(one.structure, one.batch_size) for one in steps)
    assert abs(longer - len(steps) / 2) <= 1


def test_steps_without_flops_can_be_fitted() -> None:
    steps = [MeasuredStep(structure(ADD), size, 1e-9 * 2e4 * size) for size in (1, 10, 100)]
    assert fit_totals(steps)(structure(ADD), 50) == pytest.approx(1e-9 * 2e4 * 50, rel=1e-3)


def test_the_regression_recovers_a_linear_law() -> None:
    def law(one: Structure, size: int) -> float:
        return (
            1e-3 + 1e-4 * size + 1e-5 * one.features["filters"] + 1e-2 * one.features["conv_layers"]
        )

    predict = fit_regression([MeasuredStep(one, size, law(one, size)) for one, size in drawn(0)])
    for one, size in drawn(1):
        assert predict(one, size) == pytest.approx(law(one, size), rel=1e-6)


def test_the_regression_never_predicts_less_than_the_shortest_measured_time() -> None:
    steps = [MeasuredStep(structure(CONV), size, 0.001 * size) for size in (10, 20, 30)]
    assert fit_regression(steps)(structure(CONV), 1) == pytest.approx(0.01)


def test_the_datasheet_roofline_sums_each_operations_binding_limit() -> None:
    assert datasheet_roofline(1e9, 1e8)(structure(CONV, ADD, VIEW), 10) == pytest.approx(
        2 * 1e7 / 1e9 + 5 * 4e4 / 1e8
    )


def test_torchs_formula_halves_flops_and_leaves_out_views_creations_and_recurrent_layers() -> None:
    made = operation("aten.arange", "fill", 3, 0.0, 1e9)
    recurrent = operation("aten.mkldnn_rnn_layer", "rnn", 1, 1e12, 1e3)
    seconds = torch_roofline(1e9, 1e8)(structure(CONV, ADD, VIEW, made, recurrent), 10)
    assert seconds == pytest.approx(2 * (1e7 / 2 / 0.75e9) + 5 * 4e4 / 1e8 + 1e4 / 1e8)


@pytest.mark.parametrize("fit", [fit_regression, fit_totals])
def test_a_fit_without_steps_is_refused(fit: object) -> None:
    with pytest.raises(ValueError, match="at least one measured step"):
        fit([])  # type: ignore[operator]
