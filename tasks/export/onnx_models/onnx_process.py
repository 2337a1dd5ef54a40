"""Converts a stored model to ONNX. The sandbox calls `answer`, in a process of its own."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - this is a separate process
import onnx  # noqa: TID253
import torch  # noqa: TID253

from trainwright.estimator.errors import BadInput
from trainwright.tasks.export.model_sandbox import file_or_error
from trainwright.tasks.export.onnx_models import onnx_compare as compare
from trainwright.tasks.export.onnx_models import whole_graph
from trainwright.tasks.export.onnx_models.int8_fine_tune import EPOCHS, fine_tune
from trainwright.tasks.export.onnx_models.int8_quantise import Quantiser, layers_in_float
from trainwright.tasks.export.onnx_models.onnx_compare import ModelRows
from trainwright.tasks.export.onnx_models.torch_reference import TorchReference
from trainwright.tasks.export.onnx_models.torch_to_onnx import converted
from trainwright.tasks.export.row_differences import row_errors
from trainwright.tasks.spec.metric_names import worsening

_MOST_BYTES = 2**31 - 2**20
_EXAMPLE_ROWS = 64
_NAMED = 3


def answer(request: dict[str, Any]) -> bytes:
    """The figures of an export, then the ONNX file; or an error. Runs the model's code."""
    return file_or_error(lambda path: _exported(request, path))


def _exported(request: Mapping[str, Any], path: Path) -> dict[str, Any]:
    torch_model = TorchReference.open(request)
    core = _core(torch_model)
    about = whole_graph.metadata(torch_model.rows.schema, request["run"], request["data_sha256"])
    whole = _whole(core, request, torch_model.rows, about)
    figures = torch_model.figures(whole, path)
    if request["kind"] == "onnx-int8":
        return _quantised(torch_model, core, whole, figures["metric_value"], path, request)
    rows = torch_model.rows
    run, batch = compare.session(path), compare.latency_rows(rows)
    feed, order = compare.typed(run, rows.columns(batch)), torch_model.tensors(batch)

    def by_torch() -> None:
        with torch.no_grad():
            torch_model.model(*order)

    calls = (by_torch, lambda: run.run(None, feed))
    return figures | {"latency_s": compare.latency_document(calls, rows)}


def _core(torch_model: TorchReference) -> onnx.ModelProto:
    """The model's own graph. Raises BadInput if it can't be converted."""
    rows, size = torch_model.rows, torch_model.weight_bytes
    if size > _MOST_BYTES:
        raise BadInput(
            f"model: its weights take {size / 2**30:.1f} GiB; allowed in one ONNX file: 2 GiB"
        )
    example = np.arange(min(len(rows), _EXAMPLE_ROWS))
    return converted(torch_model.model, rows.tensors(example))


def _whole(
    core: onnx.ModelProto, request: Mapping[str, Any], rows: ModelRows, about: Mapping[str, str]
) -> onnx.ModelProto:
    return whole_graph.whole(core, rows.schema, request["vocabularies"], about)


def _quantised(
    torch_model: TorchReference,
    core: onnx.ModelProto,
    whole: onnx.ModelProto,
    before: float,
    path: Path,
    request: Mapping[str, Any],
) -> dict[str, Any]:
    """Replace the float model in `path` by a quantised one. `before`: the float model's metric.

    Raises BadInput if no quantised model has a metric within the tolerance.
    """
    rows, metric, tolerance = torch_model.rows, request["metric"], request["tolerance"]
    calibration = ModelRows.open(request, "calibration")
    wanted = compare.torch_outputs(torch_model.model, calibration)
    drops: list[float] = []

    def outputs(one: onnx.ModelProto, of: ModelRows) -> list[Any]:
        return compare.onnx_outputs(compare.session(one), of, of.feed, len(wanted))

    def enough(one: onnx.ModelProto) -> bool:
        drops.append(worsening(metric, before, torch_model.metric(outputs(one, rows))))
        return bool(drops[-1] <= tolerance)

    def error(one: onnx.ModelProto) -> float:
        return float(row_errors(wanted, outputs(one, calibration)).mean())

    def quantiser(of: onnx.ModelProto, folder: str) -> Quantiser:
        run = compare.session(of)
        feeds = (compare.typed(run, calibration.feed(batch)) for batch in calibration.batches())
        return Quantiser.prepare(of, feeds, Path(folder))

    epoch, second = 0, None
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        first = quantiser(core, name)
        if not first.layers:
            raise BadInput(
                "model: has no layer to quantise; allowed for onnx-int8: a model with dense "
                "layers, convolutions or embeddings"
            )
        if request["fine_tune"] and not enough(first.quantised([])):
            epoch = _tuned(torch_model, calibration, wanted[0], before)
            second = layers_in_float(quantiser(_core(torch_model), other), enough, error)
        if second is not None and second[0] is not None and not second[1]:
            chosen, in_float = second
        else:
            chosen, in_float = layers_in_float(first, enough, error)
            if second is not None and second[0] is not None and len(second[1]) <= len(in_float):
                chosen, in_float = second
            else:
                epoch = 0
    offer = "" if request["fine_tune"] else "--fine-tune, which trains again with integers, or "
    if chosen is None:
        raise BadInput(
            f"model: with 8-bit integers in any layer, {metric} is worse by {min(drops):.3g} or "
            f"more, most of all by {', '.join(in_float[:_NAMED])}; allowed: {offer}a tolerance "
            f"above that (--tolerance, got {tolerance:g})"
        )
    notes = [f"calibrated on {len(calibration):,} rows of the training part"]
    if epoch:
        notes.append(
            "trained again on these rows with rounded numbers; the model is that of epoch "
            f"{epoch} of {EPOCHS}, which had the best metric"
        )
    if in_float:
        notes.append(
            f"{metric} is worse by {drops[0]:.3g} with integers in every layer; in float: "
            f"{', '.join(in_float)}" + ("; --fine-tune trains again instead" if offer else "")
        )
    float_bytes = path.stat().st_size
    about = {value.key: value.value for value in whole.metadata_props}
    made = _whole(chosen, request, rows, about)
    figures = torch_model.figures(made, path, most_error=math.inf)
    runs = compare.session(whole), compare.session(path)
    feed = compare.typed(runs[0], rows.columns(compare.latency_rows(rows)))
    calls = (lambda: runs[0].run(None, feed), lambda: runs[1].run(None, feed))
    return figures | {
        "float_bytes": float_bytes,
        "kept_float": in_float,
        "latency_s": compare.latency_document(calls, rows),
        "fine_tuned": epoch > 0,
        "notes": notes,
    }


def _tuned(torch_model: TorchReference, calibration: ModelRows, taught: Any, before: float) -> int:
    """Train the model again with rounded numbers, in place. Returns the number of epochs."""
    rows = torch_model.rows

    def worse(outputs: Any) -> float:
        parts = [[one.numpy() for one in outputs(*torch_model.tensors(b))] for b in rows.batches()]
        found = [np.concatenate(one) for one in zip(*parts, strict=True)]
        return worsening(torch_model.metric_name, before, torch_model.metric(found))

    return fine_tune(
        torch_model.model,
        calibration.tensors(np.arange(len(calibration))),
        torch.from_numpy(taught),
        bool(rows.schema.classes),
        worse,
    )
