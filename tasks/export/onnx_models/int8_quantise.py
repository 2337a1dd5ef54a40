"""Quantises an ONNX model to 8-bit integers, and finds the layers that must stay in float.

Static quantisation: the ranges of activations are those of calibration rows, weights have a scale
for each output channel. Weights use 7 bits, because sums of 8-bit products overflow in some CPUs'
16-bit arithmetic. `QuantizeLinear` and `DequantizeLinear` mark what is quantised (QDQ).
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - this runs in a separate process
import onnx  # noqa: TID253
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType  # noqa: TID253
from onnxruntime.quantization.calibrate import create_calibrator  # noqa: TID253
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer  # noqa: TID253
from onnxruntime.quantization.quant_utils import load_model_with_shape_infer  # noqa: TID253
from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: TID253

from trainwright.tasks.export.onnx_models import int8_graph
from trainwright.tasks.export.onnx_models.onnx_compare import Feed

_KINDS = [*int8_graph.WEIGHTS, *int8_graph.PASS_ON, "Add"]
_OUTPUT_IN_FLOAT = ["Gemm", "MatMul", "ConvTranspose"]
"""Operations whose outputs are quantised only if a quantised operation reads them."""


class FeedReader(CalibrationDataReader):  # type: ignore[misc]  # a class of onnxruntime
    """Gives the calibration one batch after the other."""

    def __init__(self, feeds: Iterable[Feed]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Feed | None:
        """The next batch; None after the last one."""
        return next(self._feeds, None)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Without the library's warnings, whose last line would be taken for an error's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class Quantiser:
    """A float model that is ready to be quantised, with the ranges of its activations."""

    path: Path
    ranges: Any
    layers: list[str]
    """the names of its layers, in order"""

    @classmethod
    @_without_warnings()
    def prepare(cls, core: onnx.ModelProto, feeds: Iterable[Feed], folder: Path) -> Quantiser:
        """Fold and infer shapes, then find the ranges on calibration rows."""
        given, path = folder / "float.onnx", folder / "prepared.onnx"
        model = onnx.ModelProto()
        model.CopyFrom(core)
        int8_graph.use_gather(model.graph)
        given.write_bytes(model.SerializeToString())
        quant_pre_process(str(given), str(path), skip_symbolic_shape=True)
        calibrator = create_calibrator(
            path,
            _KINDS,
            augmented_model_path=str(folder / "augmented.onnx"),
            calibrate_method=CalibrationMethod.MinMax,
        )
        calibrator.collect_data(FeedReader(feeds))
        ranges = calibrator.compute_data()
        return cls(path, ranges, int8_graph.layers_of(onnx.load(path).graph))

    @_without_warnings()
    def quantised(self, in_float: Sequence[str]) -> onnx.ModelProto:
        """The model with all but some layers, and what passes their inputs on, quantised."""
        graph = onnx.load(self.path).graph
        exact = {*in_float, *int8_graph.before(graph, in_float)}
        sums = int8_graph.residual_sums(graph, in_float)
        others = [one.name for one in graph.node if one.op_type == "Add" and one.name not in sums]
        quantizer = QDQQuantizer(
            load_model_with_shape_infer(self.path),
            per_channel=True,
            reduce_range=True,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=self.ranges,
            nodes_to_quantize=[],
            nodes_to_exclude=[*exact, *others],
            op_types_to_quantize=_KINDS,
            extra_options={"OpTypesToExcludeOutputQuantization": _OUTPUT_IN_FLOAT},
        )
        quantizer.quantize_model()
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "quantised.onnx"
            quantizer.model.save_model_to_file(str(path), False)
            made = onnx.load(path)
        int8_graph.give_exactly(made.graph, exact)
        int8_graph.drop_needless(made.graph)
        return made


def layers_in_float(
    quantiser: Quantiser,
    enough: Callable[[onnx.ModelProto], bool],
    error: Callable[[onnx.ModelProto], float],
) -> tuple[onnx.ModelProto | None, list[str]]:
    """The quantised model that is good enough with the fewest layers in float, and these.

    If quantising all layers is not enough, each is left in float once; those whose return lowers
    the `error` most are kept in float, one after the other. None if only the float model is enough;
    then all layers, those that cost most first.
    """
    model = quantiser.quantised([])
    if enough(model):
        return model, []
    errors = [error(quantiser.quantised([layer])) for layer in quantiser.layers]
    order = [quantiser.layers[place] for place in np.argsort(errors, kind="stable").tolist()]
    for count in range(1, len(order)):
        model = quantiser.quantised(order[:count])
        if enough(model):
            return model, sorted(order[:count], key=quantiser.layers.index)
    return None, order
