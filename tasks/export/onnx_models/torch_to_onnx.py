"""Converts a torch model to ONNX with a batch of any size."""

from __future__ import annotations

import ast
import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import onnx  # noqa: TID253 - this runs in a separate process
import torch  # noqa: TID253
from torch.utils._pytree import tree_leaves  # noqa: TID253

from trainwright.estimator.precision import for_loss
from trainwright.tasks.errors import BadInput
from trainwright.tasks.export.failing_module import failing_module
from trainwright.tasks.export.onnx_models.torch_decompositions import without_gaps

ROWS = "rows"
"""The name of the dimension of rows."""
_SCOPES = "pkg.torch.onnx.name_scopes"
_EXAMPLE_ROWS = 3
_REASON_CHARACTERS = 300
_SENTENCE = re.compile(r"(.+?)(?<!e\.g)(?<!i\.e)[.!?](?=\s|$)")


class PlainModel(torch.nn.Module):
    """A model whose inputs are positional tensors, and whose outputs are a tuple of tensors."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The model's outputs, in fp32 or wider."""
        if len(tensors) == 1:
            found = self.model(tensors[0])
        else:
            found = self.model(dict(zip(self.names, tensors, strict=True)))
        return tuple(one for one in tree_leaves(for_loss(found)) if isinstance(one, torch.Tensor))


def converted(model: PlainModel, rows: Mapping[str, torch.Tensor]) -> onnx.ModelProto:
    """The model in ONNX. Its inputs have the names of `rows`, its outputs `output`, `output_2`, ….

    Raises BadInput, which names operation and module, if it can't be converted.
    """
    args = _example([rows[name] for name in model.names])
    rows_dim = torch.export.Dim(ROWS)
    dynamic = (tuple({0: rows_dim} for _ in args),)
    with _quiet():
        program = without_gaps(_exported(model, args, dynamic))
        try:
            made = torch.onnx.export(program, dynamo=True, verbose=False, external_data=False)
        except torch.onnx.errors.OnnxExporterError as error:
            raise BadInput(_unsupported(error, program)) from error
    assert made is not None
    return _named(made.model_proto, model.names)


def _example(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A few rows, of another number than any other dimension has, which would be taken for it."""
    others = {size for one in tensors for size in one.shape[1:]}
    count = next(n for n in range(_EXAMPLE_ROWS, 10**6) if n not in others)
    return tuple(one[torch.arange(count) % len(one)] for one in tensors)


def _exported(model: PlainModel, args: Any, dynamic: Any) -> torch.export.ExportedProgram:
    def trace() -> torch.export.ExportedProgram:
        return torch.export.export(model, args, dynamic_shapes=dynamic, strict=False)

    try:
        with torch.no_grad():
            return trace()
    except Exception as error:  # torch and the model's code raise what they like
        where = failing_module(model.model, trace)
        raise BadInput(
            f"model: {where}can't be exported: {_reason(error)}; allowed: a forward pass without "
            "branches on values of tensors, for any number of rows"
        ) from error


def _reason(error: Exception) -> str:
    """An error's first sentence and the line of code that it names, as one line.

    After that sentence torch says how to debug torch.
    """
    text = str(error)
    code = re.search(r'File "[^"]*?([^"/]+)", line (\d+), in \w+\n\s+(.+)', text)
    first = " ".join(text.split("\n\n")[0].split())
    if sentence := _SENTENCE.match(first):
        first = sentence[1]
    first = first[:_REASON_CHARACTERS]
    return f"{first} ({code[1]}, line {code[2]}: {code[3].strip()})" if code else first


def _unsupported(error: Exception, program: torch.export.ExportedProgram) -> str:
    """One line that names the operation that ONNX lacks, and the module that uses it."""
    found: BaseException | None = error
    operation = ""
    while found is not None:
        if match := re.search(r"OpOverload\(op='([\w.]+)', overload='(\w+)'\)", str(found)):
            operation = match[1]
        found = found.__cause__
    if not operation:
        return f"model: can't be converted to ONNX: {_reason(error)}"
    where = _module_of(operation, program)
    return (
        f"model: {where}uses the operation {operation}, which ONNX has no counterpart for; "
        "allowed: operations that torch.onnx can translate"
    )


def _module_of(operation: str, program: torch.export.ExportedProgram) -> str:
    """The module of the first node with this operation, after decomposition."""
    wanted = operation.replace("::", ".")
    with contextlib.suppress(Exception):  # then the operation is looked for as the model has it
        program = program.run_decompositions()  # composite operations, as the exporter does
        if not any(str(node.target).startswith(wanted) for node in program.graph.nodes):
            table = torch._decomp.decomposition_table  # it decomposes by a part of this, too
            core = {one: by for one, by in table.items() if isinstance(one, torch._ops.OpOverload)}
            program = program.run_decompositions(core)
    for node in program.graph.nodes:
        if str(node.target).startswith(wanted) and (stack := node.meta.get("nn_module_stack")):
            path, kind = list(stack.values())[-1]
            name = re.sub(r"^(L\['self'\]\.)?(model\.?)?", "", str(path)) or "the model"
            kind = str(kind.__name__ if isinstance(kind, type) else kind).rsplit(".", 1)[-1]
            return f"{name} ({kind}) "
    return ""


def _named(proto: onnx.ModelProto, inputs: list[str]) -> onnx.ModelProto:
    """The graph with these inputs' names, `output`s, and one name for the number of rows."""
    graph = proto.graph
    given = {value.name for value in graph.initializer}
    old = [value for value in graph.input if value.name not in given]
    renamed = dict(zip([value.name for value in old], inputs, strict=True))
    for number, value in enumerate(graph.output, start=1):
        renamed.setdefault(value.name, "output" if number == 1 else f"output_{number}")
    dimensions = {
        one.dim_param
        for value in (*graph.input, *graph.output)
        for one in value.type.tensor_type.shape.dim[:1]
        if one.dim_param
    }
    for node in graph.node:
        node.name = _node_name(node)
    for one in (graph, *graph.node, *graph.value_info, *graph.input, *graph.output):
        del one.metadata_props[:]  # stack traces, with this machine's paths
    taken = {name for node in graph.node for name in (*node.input, *node.output)} - {*renamed}
    renamed = {name: _free(to, taken) for name, to in renamed.items()}
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = renamed.get(value.name, value.name)
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in dimensions:
                dim.dim_param = ROWS
    return proto


def _node_name(node: onnx.NodeProto) -> str:
    """The node's own name with the module that it belongs to: `layers.0/linear`.

    The exporter notes the scopes of an operation, outermost first: '', 'model', 'model.layers',
    'model.layers.0', 'linear'. The first two are `PlainModel` and the model in it.
    """
    own = node.name.removeprefix("node_")
    scopes = [one.value for one in node.metadata_props if one.key == _SCOPES]
    modules = ast.literal_eval(scopes[0])[:-1] if scopes else []
    path = modules[-1].removeprefix("model").removeprefix(".") if modules else ""
    return f"{path}/{own}" if path else own


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings, whose last line would be taken for an error's."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
