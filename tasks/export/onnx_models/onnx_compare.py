"""Runs ONNX models on a run's rows, and compares their outputs, metric and speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - this runs in a separate process
import onnx  # noqa: TID253
import onnxruntime  # noqa: TID253
import torch  # noqa: TID253

from trainwright.estimator.trace.batch_loss import BatchLoss, loss_function
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.tasks.data.tables.table_arrays import CATEGORIES
from trainwright.tasks.export.onnx_models.torch_to_onnx import PlainModel
from trainwright.tasks.export.onnx_models.whole_graph import column_inputs, takes_columns
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.train.rank.validation_metrics import sums_of

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]

BATCH_ROWS = 1024
_PASS_BYTES = 8 * 2**20
_ROUNDS, _WARM_UP = 40, 3
_LATENCY_ROWS = 64
_EXAMPLE_ROWS, _MOST_SEARCHED = 3, 1_000


@dataclass(frozen=True)
class ModelRows:
    """Rows in files, as arrays that the model takes, and as an ONNX model with columns does."""

    arrays: Mapping[str, Array]
    targets: Array
    schema: DataSchema
    stored_codes: Array | None
    category_values: Mapping[str, list[str]]

    @classmethod
    def open(cls, request: Mapping[str, Any], part: str) -> ModelRows:
        """The rows of a part, `validation` or `calibration`, unread."""
        codes = request["stored_codes"] if part == "validation" else None
        targets = request["targets" if part == "validation" else "calibration_targets"]
        return cls(
            {name: np.load(path, mmap_mode="r") for name, path in request[part].items()},
            np.load(targets, mmap_mode="r"),
            DataSchema.model_validate(request["schema"]),
            None if codes is None else np.load(codes, mmap_mode="r"),
            request["category_values"] if codes is not None else request["vocabularies"],
        )

    def __len__(self) -> int:
        return len(self.targets)

    def batches(self) -> Iterator[Array]:
        """The row numbers, in order, of parts that are small in memory."""
        row_bytes = sum(one.nbytes for one in self.arrays.values()) / max(1, len(self))
        size = max(1, min(BATCH_ROWS, int(_PASS_BYTES / max(1.0, row_bytes))))
        for at in range(0, len(self), size):
            yield np.arange(at, min(len(self), at + size))

    def feed(self, rows: Array) -> Feed:
        """Some rows as arrays."""
        return {name: np.ascontiguousarray(one[rows]) for name, one in self.arrays.items()}

    def tensors(self, rows: Array) -> dict[str, torch.Tensor]:
        """Some rows as tensors, in torch's default type."""
        dtype = torch.get_default_dtype()
        tensors = {name: torch.from_numpy(one) for name, one in self.feed(rows).items()}
        return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}

    def columns(self, rows: Array) -> Feed:
        """Some rows by column, with texts for categories; arrays if the model takes no columns."""
        if not takes_columns(self.schema):
            return self.feed(rows)
        found: Feed = {}
        offsets = {column.name: column.offset for column in self.schema.columns}
        for name, columns in column_inputs(self.schema).items():
            for place, column in enumerate(columns):
                if name != CATEGORIES:
                    values = self.arrays[name][rows, place]
                    offset = offsets[column]
                    found[column] = (
                        values.astype(np.float64) + offset if offset else values.astype(np.float32)
                    )
                    continue
                codes = self.arrays[name] if self.stored_codes is None else self.stored_codes
                texts = [missing_text(self.category_values[column]), *self.category_values[column]]
                found[column] = np.array(texts, dtype=object)[codes[rows, place]]
        return found


def missing_text(values: list[str]) -> str:
    """A text that stands for a missing value: the empty one, unless it is a value itself."""
    text = ""
    while text in values:
        text += "?"
    return text


def session(model: onnx.ModelProto | Path) -> onnxruntime.InferenceSession:
    """An ONNX model that runs in one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    given = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def torch_outputs(model: PlainModel, rows: ModelRows) -> list[Array]:
    """The model's outputs for all rows."""
    with torch.no_grad():
        parts = [_by_torch(model, rows, batch) for batch in rows.batches()]
    return [np.concatenate(one) for one in zip(*parts, strict=True)]


def _by_torch(model: PlainModel, rows: ModelRows, batch: Array) -> list[Array]:
    tensors = rows.tensors(batch)
    return [one.numpy() for one in model(*(tensors[name] for name in model.names))]


def onnx_outputs(
    run: onnxruntime.InferenceSession, rows: ModelRows, feed: Callable[[Array], Feed], count: int
) -> list[Array]:
    """The first `count` outputs of an ONNX model for all rows."""
    names = [one.name for one in run.get_outputs()][:count]
    parts = [run.run(names, typed(run, feed(batch))) for batch in rows.batches()]
    return [np.concatenate(one) for one in zip(*parts, strict=True)]


def typed(run: onnxruntime.InferenceSession, feed: Feed) -> Feed:
    """Arrays in the types of an ONNX model's inputs, in their order."""
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
    given = {}
    for one, array in zip(run.get_inputs(), feed.values(), strict=True):
        kind = kinds.get(one.type)
        given[one.name] = array if kind is None else array.astype(kind, copy=False)
    return given


def example(run: onnxruntime.InferenceSession, rows: ModelRows) -> dict[str, Any]:
    """The numbers of up to three rows that differ, their columns and an ONNX model's outputs.

    As JSON; `columns` is null if the model takes arrays.
    """
    first: dict[tuple[bytes, ...], int] = {}
    for row in range(min(len(rows), _MOST_SEARCHED)):
        first.setdefault(tuple(one[row].tobytes() for one in rows.arrays.values()), row)
        if len(first) == _EXAMPLE_ROWS:
            break
    numbers = np.array([*first.values()])
    given = rows.columns(numbers)
    names = [one.name for one in run.get_outputs()]
    outputs = run.run(names, typed(run, given))
    columns = [one.tolist() for one in given.values()] if takes_columns(rows.schema) else None
    return {
        "rows": numbers.tolist(),
        "columns": columns,
        "outputs": {name: one.tolist() for name, one in zip(names, outputs, strict=True)},
    }


def metric_value(
    name: str, outputs: list[Array], rows: ModelRows, definition: ModelDefinition, naive: Any
) -> float:
    """A metric of outputs for all rows, as the validation of a training computes it."""
    schema, found = rows.schema, torch.from_numpy(outputs[0])
    if name == "loss":
        return _loss(found, rows, loss_function(definition, schema.task))
    first = float(np.asarray(rows.targets[:1]).reshape(-1)[0])
    sums = sums_of(schema.task, len(schema.classes or ()), first, torch.device("cpu"), naive)
    assert sums is not None  # the run has the metric
    for batch in rows.batches():
        sums.add(found[batch[0] : batch[-1] + 1], torch.from_numpy(np.array(rows.targets[batch])))
    return sums.found(len(rows)).metrics[name]


def _loss(outputs: torch.Tensor, rows: ModelRows, loss: BatchLoss) -> float:
    total, weights = 0.0, 0.0
    for batch in rows.batches():
        targets = torch.from_numpy(np.array(rows.targets[batch]))
        with torch.no_grad():
            of_batch = outputs[batch[0] : batch[-1] + 1]
            mean, weight = loss.weighted(of_batch, targets, len(batch))
        total += float(mean) * weight if weight else 0.0
        weights += weight
    return total / weights if weights else math.nan


def latencies(
    calls: tuple[Callable[[], Any], Callable[[], Any]],
) -> list[dict[str, float]]:
    """Median, 5th and 95th percentile of the seconds of two calls, which take turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(_WARM_UP + _ROUNDS):
        for call, own in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            if number >= _WARM_UP:
                own.append(time.perf_counter() - began)
    return [
        dict(zip(("low", "median", "high"), np.percentile(own, (5, 50, 95)).tolist(), strict=True))
        for own in times
    ]


def latency_rows(rows: ModelRows) -> Array:
    """The rows of one call when the speed is measured."""
    return np.arange(min(_LATENCY_ROWS, len(rows)))


def latency_document(
    calls: tuple[Callable[[], Any], Callable[[], Any]], rows: ModelRows
) -> dict[str, Any]:
    """`latency_s` of a report: the first call is `float`, the second `exported`."""
    first, second = latencies(calls)
    size = len(latency_rows(rows))
    return {"batch_size": size, "rounds": _ROUNDS, "float": first, "exported": second}
