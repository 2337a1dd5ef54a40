"""Runs a stored model on a chunk of rows. The sandbox calls `answer`, in a process of its own.

If the model's source defines `predict(model, rows)`, that gets the raw columns. Otherwise the model
gets input arrays, and its outputs become class names with their probability, or numbers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - this is a separate process
import pyarrow as pa  # noqa: TID253
import torch  # noqa: TID253
from safetensors.torch import load_file

from trainwright.estimator.errors import BadInput, TrainwrightError
from trainwright.estimator.precision import PARAMETER_DTYPES, autocast, cast, for_loss, wide
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.source import ModelDefinition, described
from trainwright.tasks.inference.arrow_arrays import list_array, number_array, text_array

BATCH_ROWS = 1024
"""The most rows of one pass through the model."""
_PASS_BYTES = 8 * 2**20
"""The most bytes of input of one pass."""
Columns = dict[str, list[Any]]


def answer(request: dict[str, Any]) -> bytes:
    """The predictions of a chunk as an Arrow stream, or `{"error": …}`. Runs the model's code.

    `asks` is `form` (which answers `{"raw": …}`: whether the source defines `predict`), `raw` or
    `arrays`.
    """
    try:
        definition = model_source.load(Path(request["source"]), request["entry"])
        if request["asks"] == "form":
            return json.dumps({"raw": definition.predict is not None}).encode()
        model = _model(definition, request)
        if request["asks"] == "raw":
            parts = _raw(definition, model, request)
        else:
            parts = _from_arrays(model, request)
        return _stream(list(parts), request)
    except TrainwrightError as error:
        found = error
    except MemoryError:
        found = BadInput("model: predicting ended in a MemoryError")
    return json.dumps({"error": found.document()}).encode()


def _model(definition: ModelDefinition, request: dict[str, Any]) -> torch.nn.Module:
    precision = request["precision"]
    torch.set_default_dtype(PARAMETER_DTYPES[precision])
    model = cast(model_source.build(definition, request["config"]), precision)
    try:
        model.load_state_dict(load_file(request["weights"]))
    except RuntimeError as error:
        raise BadInput(f"model: its stored weights do not fit: {described(error)}") from error
    return model.eval()


def _raw(
    definition: ModelDefinition, model: torch.nn.Module, request: dict[str, Any]
) -> Iterator[Columns]:
    """What the source's `predict` returns for the rows in an Arrow file, or images in an .npy file.

    Images are in the column `image`: uint8 tensors (channels, height, width).
    """
    predict = definition.predict
    assert predict is not None
    if "images" in request:
        pixels = np.load(request["images"], mmap_mode="r")
        size = max(1, min(BATCH_ROWS, _PASS_BYTES // max(1, pixels[:1].nbytes)))
        for at in range(0, len(pixels), size):
            images = list(torch.from_numpy(np.array(pixels[at : at + size])))
            with torch.no_grad(), _users_code("predict"):
                found = predict(model, {"image": images})
            yield _checked(found, len(images))
        return
    with pa.memory_map(request["rows"]) as file:
        table = pa.ipc.open_file(file).read_all()
        size = len(table) if request["at_once"] else BATCH_ROWS
        for at in range(0, len(table), size):
            rows = table.slice(at, size)
            with torch.no_grad(), _users_code("predict"):
                found = predict(model, rows.to_pydict())
            yield _checked(found, None if request["at_once"] else len(rows))


def _from_arrays(model: torch.nn.Module, request: dict[str, Any]) -> Iterator[Columns]:
    """The model's outputs for the rows in .npy files, as predictions."""
    dtype = PARAMETER_DTYPES[request["precision"]]
    arrays = {name: np.load(path, mmap_mode="r") for name, path in request["arrays"].items()}
    total = len(next(iter(arrays.values())))
    row_bytes = sum(array.nbytes for array in arrays.values()) / max(1, total)
    size = max(1, min(BATCH_ROWS, int(_PASS_BYTES / max(1.0, row_bytes))))
    for at in range(0, total, size):
        batch = {
            name: _tensor(torch.from_numpy(np.array(array[at : at + size])), dtype)
            for name, array in arrays.items()
        }
        inputs = model_source.nested(batch, request["nesting"])
        with torch.no_grad(), autocast(request["precision"]), _users_code("its forward pass"):
            outputs = for_loss(model(inputs))
        yield _predictions(outputs, min(size, total - at), request, wide(dtype))


def _tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _predictions(outputs: Any, rows: int, request: dict[str, Any], dtype: torch.dtype) -> Columns:
    classes = request["classes"]
    if not isinstance(outputs, torch.Tensor) or outputs.ndim < 1 or len(outputs) != rows:
        _refuse(outputs, request)
    if classes is not None:
        if outputs.ndim != 2 or outputs.shape[1] < len(classes) or not outputs.is_floating_point():
            _refuse(outputs, request)
        best = outputs[:, : len(classes)].argmax(dim=1)
        shares = outputs.double().softmax(dim=1).gather(1, best[:, None])[:, 0]
        return {
            "prediction": [classes[one] for one in best.tolist()],
            "probability": shares.to(dtype).tolist(),
        }
    flat = outputs.reshape(rows, -1)
    single = flat.shape[1] == 1 and request["task"] != "forecasting"
    return {"prediction": (flat[:, 0] if single else flat).to(dtype).tolist()}


def _refuse(outputs: Any, request: dict[str, Any]) -> None:
    shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    classes = request["classes"]
    wanted = "(rows, …)" if classes is None else f"(rows, {len(classes)}), one logit per class"
    raise BadInput(
        f"model: returns {shape}, of which no predictions can be made; allowed: a tensor of shape "
        f"{wanted}, or a function predict(model, rows) in the model's source"
    )


@contextlib.contextmanager
def _users_code(doing: str) -> Iterator[None]:
    try:
        yield
    except (TrainwrightError, MemoryError):
        raise
    except Exception as error:
        raise BadInput(f"model: {doing} raised {described(error)}") from error


def _checked(found: Any, rows: int | None) -> Columns:
    """What `predict` returned, as lists of one length, `rows` if it is given."""
    if not isinstance(found, dict) or "prediction" not in found:
        dictionary = isinstance(found, dict)
        kind = f"the keys {sorted(map(str, found))}" if dictionary else f"a {type(found).__name__}"
        raise BadInput(f"model: predict returned {kind}; allowed: lists by name, one `prediction`")
    columns = {}
    for name, given in found.items():
        values = given.tolist() if hasattr(given, "tolist") else given
        if not isinstance(values, list | tuple):
            raise BadInput(
                f"model: predict returned a {type(given).__name__} for {str(name)!r}; "
                "allowed: a list of values"
            )
        columns[str(name)] = list(values)
    wanted = len(columns["prediction"]) if rows is None else rows
    for name, values in columns.items():
        if len(values) != wanted:
            raise BadInput(
                f"model: predict returned {len(values)} values of {name!r} for {wanted} rows"
            )
    return columns


def _stream(parts: list[Columns], request: dict[str, Any]) -> bytes:
    """All parts as one Arrow stream; classes are texts, other values numbers or lists of them."""
    names = list(parts[0])
    if any(list(part) != names for part in parts):
        raise BadInput("model: predict returned different names for different rows")
    exact = request["asks"] == "raw" or request["precision"] == "fp64"
    dtype = "float64" if exact else "float32"
    columns = {}
    for name in names:
        values = [value for part in parts for value in part[name]]
        if name == "prediction" and request["classes"] is not None:
            values = [None if one is None else str(one) for one in values]
        columns[name] = _array(values, dtype, name)
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _array(values: list[Any], dtype: str, name: str) -> Any:
    first = next((one for one in values if one is not None), None)
    try:
        if isinstance(first, str):
            return text_array(values)
        lists = isinstance(first, list | tuple)
        return list_array(values, dtype) if lists else number_array(values, dtype)
    except (AttributeError, TypeError, ValueError) as error:
        raise BadInput(
            f"model: predict returned values of {name!r} that are not all texts, numbers or lists "
            "of numbers"
        ) from error
