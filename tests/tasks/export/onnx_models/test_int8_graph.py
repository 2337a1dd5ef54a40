"""Graphs around quantising: which sums and convolutions become integers, and what is left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trainwright.tasks.export.onnx_models import int8_graph
from trainwright.tasks.export.onnx_models.int8_quantise import Quantiser
from trainwright.tasks.export.onnx_models.onnx_compare import session

ROWS = np.random.default_rng(0).normal(size=(20, 4, 6, 6)).astype(np.float32)


def model(
    nodes: list[onnx.NodeProto], shape: list[int | str], **constants: np.ndarray
) -> onnx.ModelProto:
    """A graph from `x` to `y` of this shape."""
    graph = helper.make_graph(
        nodes,
        "case",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def residual() -> onnx.ModelProto:
    """Two convolutions; the second one's output is added to the first one's."""
    rng = np.random.default_rng(1)
    weights = {n: rng.normal(size=(4, 4, 3, 3)).astype(np.float32) / 6 for n in ("w1", "w2")}
    biases = {n: rng.normal(size=4).astype(np.float32) for n in ("b1", "b2")}
    pads = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], name="first", **pads),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("Conv", ["r", "w2", "b2"], ["c"], name="second", **pads),
        helper.make_node("Add", ["r", "c"], ["s"], name="sum"),
        helper.make_node("Sigmoid", ["s"], ["y"], name="sigmoid"),
    ]
    return model(nodes, ["rows", 4, 6, 6], **weights, **biases)


def test_a_sum_of_convolutions_is_quantised_unless_one_of_them_is_not() -> None:
    graph = residual().graph
    assert int8_graph.residual_sums(graph, []) == ["sum"]
    assert int8_graph.residual_sums(graph, ["second"]) == []
    assert int8_graph.layers_of(graph) == ["first", "second"]


def test_a_residual_block_is_computed_with_integers_and_is_close(tmp_path: Path) -> None:
    exact = residual()
    quantiser = Quantiser.prepare(exact, [{"x": ROWS}], tmp_path)
    made = quantiser.quantised([])
    onnx.checker.check_model(made, full_check=True)
    makers = {name: node for node in made.graph.node for name in node.output}
    for kind in ("Conv", "Add"):
        for node in (one for one in made.graph.node if one.op_type == kind):
            assert {makers[name].op_type for name in node.input} == {"DequantizeLinear"}
            readers = [one.op_type for one in made.graph.node if node.output[0] in one.input]
            assert set(readers) == {"QuantizeLinear"}
    wanted, found = (session(one).run(None, {"x": ROWS})[0] for one in (exact, made))
    assert np.abs(wanted - found).max() < 0.02


def test_a_layer_in_float_reads_what_the_layer_before_computed(tmp_path: Path) -> None:
    quantiser = Quantiser.prepare(residual(), [{"x": ROWS}], tmp_path)
    made = quantiser.quantised(["second"])
    makers = {name: node for node in made.graph.node for name in node.output}
    [second] = [one for one in made.graph.node if one.name == "second"]
    assert makers[second.input[0]].op_type == "Relu"
    assert second.input[1] == "w2"


def test_nothing_is_left_that_no_node_reads(tmp_path: Path) -> None:
    made = Quantiser.prepare(residual(), [{"x": ROWS}], tmp_path).quantised(["first"])
    read = {name for node in made.graph.node for name in node.input} | {"y"}
    assert {one.name for one in made.graph.initializer} <= read
    assert all(read & {*node.output} for node in made.graph.node)
    assert not made.graph.value_info


def test_entries_of_a_list_are_gathered_alike(tmp_path: Path) -> None:
    table = np.linspace(-1, 1, 50).astype(np.float32)
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("Cast", ["a"], ["i"], to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["i", "last"], ["u"]),
        helper.make_node("GatherND", ["table", "u"], ["y"], name="gather"),
    ]
    exact = model(nodes, ["rows", 4, 6, 6], table=table, last=np.array([-1]))
    wanted = session(exact).run(None, {"x": ROWS})[0]
    int8_graph.use_gather(exact.graph)
    assert "GatherND" not in {one.op_type for one in exact.graph.node}
    np.testing.assert_array_equal(session(exact).run(None, {"x": ROWS})[0], wanted)
    assert int8_graph.layers_of(exact.graph) == ["gather"]
