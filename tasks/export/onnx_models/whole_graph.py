"""Joins to a converted model how its inputs are made of a row's columns, and what its outputs say.

    number columns    (rows,) each, NaN for missing      -> one array
    category columns  (rows,) each, texts                -> codes by the run's vocabulary, 0 else
    output            as the model returns it            -> for classes also `label`, `probability`

Columns are inputs by their names. A model whose inputs are no columns of numbers and categories
(images, tokens, series) keeps its arrays as inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx  # noqa: TID253 - this runs in a separate process
from onnx import TensorProto, helper  # noqa: TID253

from trainwright.tasks.data.tables.table_arrays import CATEGORIES
from trainwright.tasks.export.onnx_models.torch_to_onnx import ROWS
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

PREFIX = "model/"
"""The prefix of all names of the converted model's own graph."""
_ML = "ai.onnx.ml"
_ML_VERSION = 3


@dataclass
class GraphParts:
    """The parts of a graph while it is made."""

    taken: set[str]
    inputs: list[Any] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)

    def name(self, wanted: str) -> str:
        """A free name like the wanted one."""
        while wanted in self.taken:
            wanted += "_"
        self.taken.add(wanted)
        return wanted

    def constant(self, name: str, kind: int, shape: list[int], values: list[Any]) -> str:
        """The name of a constant tensor."""
        free = self.name(name)
        self.constants.append(helper.make_tensor(free, kind, shape, values))
        return free

    def node(self, kind: str, inputs: list[str], output: str, **options: Any) -> str:
        """Add a node. Returns the name of its output."""
        free = self.name(output)
        self.nodes.append(helper.make_node(kind, inputs, [free], name=free, **options))
        return free


def takes_columns(schema: DataSchema) -> bool:
    """Whether a model's inputs are made of columns of numbers and categories."""
    kinds = {column.kind for column in schema.columns}
    return bool(kinds) and not kinds - {"number", "category"}


def column_inputs(schema: DataSchema) -> dict[str, list[str]]:
    """The columns of each input array, in order."""
    numbers = [column.name for column in schema.columns if column.kind == "number"]
    categories = [column.name for column in schema.columns if column.kind == "category"]
    return {name: categories if name == CATEGORIES else numbers for name in schema.inputs}


def whole(
    core: onnx.ModelProto,
    schema: DataSchema,
    vocabularies: Mapping[str, list[str]],
    about: Mapping[str, str],
) -> onnx.ModelProto:
    """The graph from columns, or arrays, to outputs and labels. `about`: entries of its metadata.

    `vocabularies`: the values of codes 1, 2, … of each category column.
    """
    columns = takes_columns(schema)
    shown = [value.name for value in core.graph.output]
    given = [value.name for value in core.graph.input]
    inner = onnx.compose.add_prefix(core, PREFIX)
    graph = inner.graph
    taken = {one.name for one in (*graph.initializer, *graph.value_info)}
    taken |= {name for node in graph.node for name in (*node.input, *node.output)}
    parts = GraphParts(taken)
    into: dict[str, str] = {}
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    for name in given:
        if columns:
            into[PREFIX + name] = _of_columns(
                parts, name, schema, vocabularies, types[PREFIX + name]
            )
        else:
            array = next(one for one in graph.input if one.name == PREFIX + name)
            value = onnx.ValueInfoProto()
            value.CopyFrom(array)
            value.name = into[PREFIX + name] = parts.name(name)
            parts.inputs.append(value)
    before = len(parts.nodes)
    outputs = [_output(parts, graph, PREFIX + name, name) for name in shown]
    if schema.classes:
        outputs += _labels(parts, graph.output[0], outputs[0].name, schema.classes)
    _rename(graph, into)
    made = helper.make_graph(
        [*parts.nodes[:before], *graph.node, *parts.nodes[before:]],
        "trainwright",
        parts.inputs,
        outputs,
        [*graph.initializer, *parts.constants],
        value_info=[one for one in graph.value_info if one.name not in into],
    )
    versions = {one.domain: one.version for one in inner.opset_import} | {_ML: _ML_VERSION}
    model = helper.make_model(
        made,
        opset_imports=[helper.make_opsetid(domain, one) for domain, one in versions.items()],
        functions=list(inner.functions),
        producer_name="trainwright",
        ir_version=inner.ir_version,
    )
    helper.set_model_props(model, dict(about))
    return model


def opset(model: onnx.ModelProto) -> int:
    """The version of ONNX's own operators that a model uses."""
    return max(int(one.version) for one in model.opset_import if one.domain in ("", "ai.onnx"))


def _of_columns(
    parts: GraphParts,
    array: str,
    schema: DataSchema,
    vocabularies: Mapping[str, list[str]],
    kind: int,
) -> str:
    """The name of the array that is made of columns; those with an offset are 64 bits wide."""
    offsets = {column.name: column.offset for column in schema.columns}
    axis = parts.constant(f"{array} axis", TensorProto.INT64, [1], [1])
    wide = []
    for column in column_inputs(schema)[array]:
        texts = array == CATEGORIES
        given = parts.name(column or "column")
        offset = offsets[column]
        number = TensorProto.DOUBLE if offset else TensorProto.FLOAT
        element = TensorProto.STRING if texts else number
        parts.inputs.append(helper.make_tensor_value_info(given, element, [ROWS]))
        if texts:
            values = list(vocabularies.get(column, []))
            given = parts.node(
                "LabelEncoder",
                [given],
                f"{column} code",
                domain=_ML,
                keys_strings=values or [""],
                values_int64s=list(range(1, len(values) + 1)) or [0],
                default_int64=0,
            )
        elif offset:
            from_ = parts.constant(f"{column} offset", TensorProto.DOUBLE, [1], [float(offset)])
            exact = parts.node("Sub", [given, from_], f"{column} distance")
            given = parts.node("Cast", [exact], f"{column} number", to=TensorProto.FLOAT)
        wide.append(parts.node("Unsqueeze", [given, axis], f"{column} column"))
    joined = parts.node("Concat", wide, f"{array} joined", axis=1)
    stored = TensorProto.INT64 if array == CATEGORIES else TensorProto.FLOAT
    return joined if stored == kind else parts.node("Cast", [joined], f"{array} cast", to=kind)


def _output(parts: GraphParts, graph: Any, inner: str, name: str) -> Any:
    value = onnx.ValueInfoProto()
    value.CopyFrom(next(one for one in graph.output if one.name == inner))
    value.name = parts.node("Identity", [inner], name)
    return value


def _labels(parts: GraphParts, logits: Any, output: str, classes: list[str]) -> list[Any]:
    """The nodes of `label`, the class of the largest logit, and of its `probability`."""
    kind = logits.type.tensor_type.elem_type
    if len(logits.type.tensor_type.shape.dim) != 2:
        return []
    names = parts.constant("classes", TensorProto.STRING, [len(classes)], list(classes))
    axis = parts.constant("last axis", TensorProto.INT64, [1], [1])
    start = parts.constant("first class", TensorProto.INT64, [1], [0])
    end = parts.constant("number of classes", TensorProto.INT64, [1], [len(classes)])
    known = parts.node("Slice", [output, start, end, axis], "class logits")
    best = parts.node("ArgMax", [known], "best class", axis=1, keepdims=1)
    flat = parts.node("Squeeze", [best, axis], "class number")
    label = parts.node("Gather", [names, flat], "label", axis=0)
    shares = parts.node("Softmax", [output], "shares", axis=1)
    chosen = parts.node("GatherElements", [shares, best], "best share", axis=1)
    probability = parts.node("Squeeze", [chosen, axis], "probability")
    return [
        helper.make_tensor_value_info(label, TensorProto.STRING, [ROWS]),
        helper.make_tensor_value_info(probability, kind, [ROWS]),
    ]


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


def metadata(schema: DataSchema, run: str, sha256: str) -> dict[str, str]:
    """What a file says of itself: run, data, classes, and the units of inputs and outputs."""
    units = "logits, one for each class" if schema.classes else f"the unit of {schema.target}"
    inputs = {name: _unit(name, schema) for name in schema.inputs}
    if takes_columns(schema):
        inputs = {
            one.name: "number, in the unit of the data; NaN: missing"
            if one.kind == "number"
            else "text; any other text than those of the training data: missing"
            for one in schema.columns
        }
    return {
        "run": run,
        "data_sha256": sha256,
        "task": schema.task,
        "target": schema.target,
        "classes": json.dumps(schema.classes),
        "inputs": json.dumps(inputs),
        "outputs": json.dumps({"output": units}),
    }


def _unit(name: str, schema: DataSchema) -> str:
    if len(schema.inputs[name]) == 3 and schema.task == "image-classification":
        return "pixels from 0 to 1; channels, height, width"
    if schema.task == "text-classification":
        return (
            "for each word, in lower case, CRC-32 of its UTF-8 modulo 2**20, plus 1; then 0; "
            r"words: \w+|[^\w\s]"
        )
    return f"{schema.input_dtypes[name]} array of shape (rows, {schema.inputs[name]})"
