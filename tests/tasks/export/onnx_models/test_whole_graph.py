"""The graph that is joined to a converted model: a row's columns become the model's arrays."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from trainwright.tasks.export.onnx_models.onnx_compare import session
from trainwright.tasks.export.onnx_models.whole_graph import whole
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema


def test_numbers_with_an_offset_are_subtracted_in_64_bits() -> None:
    offset = 1_700_000_000_000
    schema = DataSchema(
        task="tabular-regression",
        rows=4,
        train_rows=3,
        validation_rows=1,
        inputs={"inputs": (2,)},
        input_dtypes={"inputs": "float32"},
        target="y",
        target_dtype="float32",
        columns=[
            Column(name="a", kind="number"),
            Column(name="ms", kind="number", offset=offset),
        ],
        sha256="0",
    )
    shape = ["rows", 2]
    core = helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", ["inputs"], ["output"])],
            "core",
            [helper.make_tensor_value_info("inputs", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, shape)],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    made = whole(core, schema, {}, {})
    onnx.checker.check_model(made, full_check=True)
    rows = {"a": np.float32([1.5, 2.0]), "ms": np.float64([offset - 3, offset + 1])}
    [found] = session(made).run(["output"], rows)
    assert found.tolist() == [[1.5, -3], [2, 1]]
