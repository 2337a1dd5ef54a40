"""Quantised ONNX models: smaller, close to float, and layers that stay in float where they must."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trainwright.tasks.export.onnx_models.int8_quantise import Quantiser, layers_in_float
from trainwright.tasks.export.onnx_models.onnx_compare import Feed, session
from trainwright.tasks.spec.metric_names import worsening

WIDTH = 64


def two_layers(first_scale: float) -> onnx.ModelProto:
    """Two dense layers; the first one's outputs for one input are `first_scale` times larger."""
    rng = np.random.default_rng(1)
    first = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8
    first[:, 0] *= first_scale
    second = rng.normal(size=(WIDTH, 3)).astype(np.float32) / 8
    second[0] /= first_scale
    shapes = {"x": ["rows", WIDTH], "y": ["rows", 3]}
    values = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()}
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "w1"], ["h"], name="first"),
            helper.make_node("Relu", ["h"], ["r"], name="relu"),
            helper.make_node("Gemm", ["r", "w2"], ["y"], name="second"),
        ],
        "two",
        [values["x"]],
        [values["y"]],
        [numpy_helper.from_array(first, "w1"), numpy_helper.from_array(second, "w2")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def feeds() -> list[Feed]:
    rng = np.random.default_rng(2)
    return [{"x": rng.normal(size=(100, WIDTH)).astype(np.float32)} for _ in range(3)]


def error_of(model: onnx.ModelProto, exact: onnx.ModelProto) -> float:
    given = feeds()[0]
    wanted, found = (session(one).run(["y"], given)[0] for one in (exact, model))
    return float(np.sqrt(np.mean(np.square(found - wanted)) / np.mean(np.square(wanted))))


def test_a_quantised_model_is_smaller_and_close(tmp_path: Path) -> None:
    exact = two_layers(1.0)
    quantiser = Quantiser.prepare(exact, feeds(), tmp_path)
    assert quantiser.layers == ["first", "second"]
    made = quantiser.quantised([])
    onnx.checker.check_model(made, full_check=True)
    assert error_of(made, exact) < 0.05
    assert len(made.SerializeToString()) < 0.5 * len(exact.SerializeToString())
    kinds = {numpy_helper.to_array(one).dtype for one in made.graph.initializer if one.dims}
    assert np.dtype(np.int8) in kinds


def test_all_layers_in_float_are_the_float_model(tmp_path: Path) -> None:
    exact = two_layers(1.0)
    quantiser = Quantiser.prepare(exact, feeds(), tmp_path)
    assert error_of(quantiser.quantised(["first", "second"]), exact) < 1e-6


def test_the_layer_to_blame_stays_in_float(tmp_path: Path) -> None:
    exact = two_layers(300.0)  # the ranges of the hidden layer no longer fit 8 bits
    quantiser = Quantiser.prepare(exact, feeds(), tmp_path)
    assert error_of(quantiser.quantised([]), exact) > 0.3
    model, in_float = layers_in_float(
        quantiser,
        enough=lambda one: error_of(one, exact) < 0.1,
        error=lambda one: error_of(one, exact),
    )
    assert model is not None
    assert in_float == ["second"]
    assert error_of(model, exact) < 0.1


def test_no_model_is_found_if_none_is_good_enough(tmp_path: Path) -> None:
    quantiser = Quantiser.prepare(two_layers(300.0), feeds(), tmp_path)
    model, in_float = layers_in_float(quantiser, enough=lambda _: False, error=lambda _: 0.0)
    assert model is None
    assert sorted(in_float) == quantiser.layers


@pytest.mark.parametrize(
    ("metric", "before", "after", "worse"),
    [
        ("accuracy", 0.95, 0.94, 0.01),
        ("auc", 0.9, 0.91, -0.01),
        ("rmse", 2.0, 2.2, 0.1),
        ("rmse", 0.0, 0.0, 0.0),
        ("rmse", 0.0, 1.0, float("inf")),
        ("r2", 0.5, 0.25, 0.25),
    ],
)
def test_how_much_worse_a_metric_is(metric: str, before: float, after: float, worse: float) -> None:
    assert worsening(metric, before, after) == pytest.approx(worse)
