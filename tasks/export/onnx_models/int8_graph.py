"""Changes of ONNX graphs around quantising: what can be quantised, and what a file needs not hold.

Runtimes compute a convolution, or a sum of two convolutions, with integers only if both its inputs
and its output are quantised. A dense layer may have an output in float.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np  # noqa: TID253 - this runs in a separate process
import onnx  # noqa: TID253
from onnx import helper, numpy_helper  # noqa: TID253

PASS_ON = ("Relu", "Clip", "MaxPool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze")
"""Operations that only pass values on."""
WEIGHTS = {"Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1, "Gather": 0}
"""Operations with weights, each of which may stay in float, and the place of the weights."""


def layers_of(graph: Any) -> list[str]:
    """The names of the nodes that have constant weights of floats, in order."""
    constants = {one.name for one in graph.initializer if one.data_type == onnx.TensorProto.FLOAT}
    return [
        node.name
        for node in graph.node
        if node.op_type in WEIGHTS and node.input[WEIGHTS[node.op_type]] in constants
    ]


def use_gather(graph: Any) -> None:
    """Replace `GatherND` of a list's entries, which nothing quantises, by `Gather`."""
    lists = {one.name for one in graph.initializer if len(one.dims) == 1}
    made: list[Any] = []
    for node in graph.node:
        ranks = [one for one in node.attribute if one.name == "batch_dims" and one.i]
        if node.op_type != "GatherND" or node.input[0] not in lists or ranks:
            made.append(node)
            continue
        axis, flat = f"{node.output[0]} last axis", f"{node.output[0]} indices"
        graph.initializer.append(numpy_helper.from_array(np.array([-1]), axis))
        made.append(helper.make_node("Squeeze", [node.input[1], axis], [flat], name=flat))
        gather = helper.make_node("Gather", [node.input[0], flat], node.output, name=node.name)
        made.append(gather)
    del graph.node[:]
    graph.node.extend(made)


def residual_sums(graph: Any, in_float: Container[str]) -> list[str]:
    """The names of sums of a convolution and something computed, which none in float reaches."""
    makers = _makers(graph)
    found: list[str] = []

    def maker(name: str) -> Any:
        node = makers.get(name)
        while node is not None and node.op_type in ("Relu", "Clip"):
            node = makers.get(node.input[0])
        return node

    for node in graph.node:
        made = [one for one in map(maker, node.input) if one is not None]
        if node.op_type != "Add" or len(made) < 2 or any(one.name in in_float for one in made):
            continue
        if any(one.op_type == "Conv" or one.name in found for one in made):
            found.append(node.name)
    return found


def before(graph: Any, layers: Container[str]) -> list[str]:
    """The names of the nodes that only pass values on to these layers."""
    makers = _makers(graph)
    waiting = [name for node in graph.node if node.name in layers for name in node.input]
    found: list[str] = []
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is not None and maker.op_type in PASS_ON and maker.name not in found:
            found.append(maker.name)
            waiting += maker.input
    return found


def give_exactly(graph: Any, nodes: Container[str]) -> None:
    """Let these nodes read what was computed, not what was rounded to 8 bits."""
    makers = _makers(graph)
    for node in graph.node:
        if node.name in nodes:
            for place, name in enumerate(node.input):
                back = makers.get(name)
                if back is not None and back.op_type == "DequantizeLinear":
                    there = makers.get(back.input[0])
                    if there is not None and there.op_type == "QuantizeLinear":
                        node.input[place] = there.input[0]


def drop_needless(graph: Any) -> None:
    """Remove what is not used, shapes that any reader infers, and zero points of constants.

    A missing zero point is 0. Weights of dense layers keep theirs: without it onnxruntime
    multiplies floats.
    """
    constants = {one.name: one for one in graph.initializer}
    dense = {n for node in graph.node if node.op_type != "Conv" for n in node.input[:2]}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in constants:
            zeros = [numpy_helper.to_array(constants[name]) for name in node.input[2:]]
            if node.output[0] not in dense and not any(one.any() for one in zeros):
                del node.input[2:]
    outputs = {one.name for one in graph.output}
    while True:
        used = _used(graph) | outputs
        unused = [node for node in graph.node if not used & {*node.output}]
        if not unused:
            break
        for node in unused:
            graph.node.remove(node)
    kept = [one for one in graph.initializer if one.name in used]
    del graph.initializer[:], graph.value_info[:]
    graph.initializer.extend(kept)


def _used(graph: Any) -> set[str]:
    return {name for node in graph.node for name in node.input if name}


def _makers(graph: Any) -> dict[str, Any]:
    return {name: node for node in graph.node for name in node.output}
