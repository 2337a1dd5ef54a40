"""The stored torch model with its outputs on the validation rows, and ONNX models beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - this runs in a separate process
import onnx  # noqa: TID253
import onnxruntime  # noqa: TID253
import torch  # noqa: TID253
from safetensors.torch import load_file

from trainwright.estimator.precision import PARAMETER_DTYPES, cast, wide
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.source import ModelDefinition, described
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.export.onnx_models import onnx_compare as compare
from trainwright.tasks.export.onnx_models import whole_graph
from trainwright.tasks.export.onnx_models.onnx_compare import Array, ModelRows
from trainwright.tasks.export.onnx_models.torch_to_onnx import PlainModel
from trainwright.tasks.export.row_differences import compared, output_sizes, row_errors

MOST_ERROR = 1e-4
"""An ONNX model whose outputs differ by more from torch's is not the same model."""
_BATCHES = (1, 2, 257)


@dataclass(frozen=True)
class TorchReference:
    """A model in fp32 or wider, its outputs for all validation rows, and its metric's name."""

    definition: ModelDefinition
    model: PlainModel
    rows: ModelRows
    outputs: list[Array]
    metric_name: str
    naive: float | None
    """the scale of the metric mase"""

    @classmethod
    def open(cls, request: Mapping[str, Any]) -> TorchReference:
        """Build the model, load its weights, and run it. Raises BadInput."""
        definition = model_source.load(Path(request["source"]), request["entry"])
        rows, model = ModelRows.open(request, "validation"), _plain_model(definition, request)
        try:
            outputs = compare.torch_outputs(model, rows)
        except Exception as error:
            raise BadInput(f"model: its forward pass raised {described(error)}") from error
        if not outputs or any(len(one) != len(rows) for one in outputs):
            raise BadInput(
                "model: returns no tensor with one entry for each row; allowed: such tensors"
            )
        return cls(definition, model, rows, outputs, request["metric"], request["naive"])

    @property
    def weight_bytes(self) -> int:
        """The size of parameters and buffers."""
        return sum(one.nbytes for one in self.model.state_dict().values())

    def tensors(self, rows: Array) -> list[torch.Tensor]:
        """Some rows, as the model's arguments."""
        found = self.rows.tensors(rows)
        return [found[name] for name in self.model.names]

    def metric(self, outputs: list[Array]) -> float:
        """The metric of a model's outputs for the validation rows."""
        return compare.metric_value(
            self.metric_name, outputs, self.rows, self.definition, self.naive
        )

    def figures(
        self, made: onnx.ModelProto, path: Path, most_error: float = MOST_ERROR
    ) -> dict[str, Any]:
        """Check an ONNX model, write it to a file, and compare it with this one.

        Raises TrainwrightError if outputs differ by more than `most_error`, for any size of batch.
        """
        onnx.checker.check_model(made, full_check=True)
        path.write_bytes(made.SerializeToString())
        run, exact = compare.session(path), self.outputs
        found = compare.onnx_outputs(run, self.rows, self.rows.columns, len(exact))
        sizes = output_sizes(exact)
        errors = [row_errors(exact, found, sizes).max(initial=0.0)]
        for size in _BATCHES:
            batch = np.arange(size) % len(self.rows)
            feed = compare.typed(run, self.rows.columns(batch))
            outputs = run.run(None, feed)[: len(exact)]
            off = row_errors([one[batch] for one in exact], outputs, sizes)
            errors.append(off.max(initial=0.0))
        worst = float(max(errors))
        if not worst <= most_error:
            raise TrainwrightError(
                f"export: the ONNX model's outputs differ from torch's by {worst:.2g} of their "
                f"size; allowed: {most_error:g}"
            )
        return {
            "metric_value": self.metric(found),
            "max_error": worst,
            **compared(exact[0], found[0], self.rows.targets, len(self.rows.schema.classes or ())),
            "rows": len(self.rows),
            "example": compare.example(run, self.rows),
            "opset": whole_graph.opset(made),
            "size_bytes": path.stat().st_size,
            "inputs": [_described(one) for one in run.get_inputs()],
            "outputs": [_described(one) for one in run.get_outputs()],
            "operations": _operations(made),
            "tools": {
                "onnx": onnx.__version__,
                "onnxruntime": onnxruntime.__version__,
                "torch": str(torch.__version__),
            },
        }


def _plain_model(definition: ModelDefinition, request: Mapping[str, Any]) -> PlainModel:
    """The stored model in fp32 or wider, ready to predict. Raises BadInput."""
    dtype = wide(PARAMETER_DTYPES[request["precision"]])
    torch.set_default_dtype(dtype)
    precision = "fp64" if dtype == torch.float64 else "fp32"
    model = cast(model_source.build(definition, request["config"]), precision)
    try:
        model.load_state_dict(load_file(request["weights"]))
    except RuntimeError as error:
        raise BadInput(f"model: its stored weights do not fit: {described(error)}") from error
    return PlainModel(model.eval(), list(request["validation"])).eval()


def _described(value: Any) -> dict[str, Any]:
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    return {"name": value.name, "dtype": kind, "shape": list(value.shape)}


def _operations(model: onnx.ModelProto) -> dict[str, int]:
    """The model's own operations by kind, most frequent first."""
    counts: dict[str, int] = {}
    for node in model.graph.node:
        if node.name.startswith(whole_graph.PREFIX):
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return dict(sorted(counts.items(), key=lambda one: -one[1]))
