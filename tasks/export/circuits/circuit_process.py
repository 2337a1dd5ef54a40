"""Turns a stored model into integers. The sandbox calls `answer`, in a process of its own.

It builds the user's model, reads its layers, refuses what no circuit can hold, searches the bit
widths, and chooses the narrowest model whose metric on the validation rows is within the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - this is a separate process
import torch  # noqa: TID253
from safetensors.torch import load_file

from trainwright.estimator.errors import BadInput, TrainwrightError
from trainwright.estimator.precision import PARAMETER_DTYPES, cast
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.batch_loss import loss_function
from trainwright.estimator.trace.source import ModelDefinition, described
from trainwright.tasks.export.circuits.fine_tune import Tuned, TuneLimits, tune
from trainwright.tasks.export.circuits.integer_model import IntegerModel
from trainwright.tasks.export.circuits.predict_cells import adder_bits, cells_of_adders
from trainwright.tasks.export.circuits.quantised_network import (
    InputScale,
    QuantisedNetwork,
    float_outputs,
    same_widths,
)
from trainwright.tasks.export.circuits.read_layers import FloatCircuit, read
from trainwright.tasks.export.model_sandbox import file_or_error
from trainwright.tasks.export.row_differences import compared, row_errors
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.spec.metric_names import worsening
from trainwright.tasks.train.rank.validation_metrics import sums_of

Array = np.ndarray[Any, Any]
_TRACED_ROWS = 3
_ROWS_AT_ONCE = 512
_REFERENCE_BITS = 6
"""widths at which a model's size is judged before it is trained"""
_MOST_DIFFERENCE = 1e-3
"""of the chain of layers from the torch model, relative to the outputs' size"""


def answer(request: dict[str, Any]) -> bytes:
    """A line of JSON, then the integer model as .npz; or `{"error": …}`. Runs the model's code."""
    return file_or_error(lambda path: _integers(request, path))


def _integers(request: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write the integer model to a file. Returns its figures."""
    torch.set_num_threads(1)
    definition = model_source.load(Path(request["source"]), request["entry"])
    model = _model(definition, request)
    names = list(request["validation"])
    validation = {name: np.load(request["validation"][name]) for name in names}
    calibration = {name: np.load(request["calibration"][name]) for name in names}
    circuit = read(model, _tensors(calibration, slice(0, _TRACED_ROWS)))
    exact = _torch_outputs(model, validation)
    numbers = _numbers(circuit, calibration)
    _require_equal(circuit, validation, exact)
    schema = DataSchema.model_validate(request["schema"])
    of_table = schema.task.startswith("tabular")
    styles = _judged(circuit, numbers, of_table, len(exact), request)
    tuned = tune(
        circuit,
        numbers,
        schema.classes is not None,
        of_table,
        lambda one: sum(adder_bits(one)),
        TuneLimits(request["tolerance"], request["search_s"]),
    )
    targets = np.load(request["targets"])
    metric = _metric(definition, targets, schema, request)
    chosen, trained, value = _chosen(tuned, validation, exact, metric, request)
    outputs = _outputs(chosen.model, validation)
    chosen.model.save(path)
    return {
        "trained": trained,
        "exported": value,
        "rows": len(exact),
        **compared(exact, outputs, targets, len(schema.classes or ())),
        "max_error": float(row_errors([exact], [outputs]).max(initial=0.0)),
        "widths": {
            "inputs": chosen.widths.inputs,
            "weights": chosen.widths.weights,
            "outputs": chosen.widths.outputs,
        },
        "styles": styles,
    }


def _model(definition: ModelDefinition, request: dict[str, Any]) -> torch.nn.Module:
    torch.set_default_dtype(PARAMETER_DTYPES["fp32"])
    model = cast(model_source.build(definition, request["config"]), "fp32")
    try:
        model.load_state_dict(load_file(request["weights"]))
    except RuntimeError as error:
        raise BadInput(f"model: its stored weights do not fit: {described(error)}") from error
    return model.eval()


def _tensors(arrays: dict[str, Array], rows: slice) -> dict[str, torch.Tensor]:
    found = {name: torch.from_numpy(np.array(array[rows])) for name, array in arrays.items()}
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in found.items()
    }


@torch.no_grad()
def _torch_outputs(model: torch.nn.Module, arrays: dict[str, Array]) -> Array:
    """The trained model's outputs, (rows, …), on all rows."""
    parts = []
    for at in range(0, len(next(iter(arrays.values()))), _ROWS_AT_ONCE):
        batch = _tensors(arrays, slice(at, at + _ROWS_AT_ONCE))
        inputs: Any = next(iter(batch.values())) if len(batch) == 1 else batch
        try:
            found = model(inputs)
        except Exception as error:
            raise BadInput(f"model: its forward pass raised {described(error)}") from error
        parts.append(found.double().numpy())
    return np.concatenate(parts)


def _numbers(circuit: FloatCircuit, arrays: dict[str, Array]) -> Array:
    """The circuit's inputs for rows, before they are rounded."""
    found = circuit.before.run(arrays)
    numbers = found.reshape(len(found), -1).astype(np.float64)
    if not np.isfinite(numbers).all():
        raise BadInput(
            "model: a circuit's inputs would be missing or infinite values; allowed for --to rtl: "
            "data without missing values, or a model that replaces them first"
        )
    return numbers


def _require_equal(circuit: FloatCircuit, arrays: dict[str, Array], exact: Array) -> None:
    """Raises TrainwrightError if the layers as read are not the model."""
    numbers = _numbers(circuit, arrays)
    found = circuit.after.run({"circuit": float_outputs(circuit, numbers).numpy()})
    size = max(float(np.abs(exact).max(initial=0)), 1e-12)
    if (
        found.shape != exact.shape
        or not np.abs(found - exact).max(initial=0) <= _MOST_DIFFERENCE * size
    ):
        raise TrainwrightError(
            "export: the layers read from the model do not give its outputs; its forward pass may "
            "depend on the values of rows"
        )


def _judged(
    circuit: FloatCircuit, numbers: Array, of_table: bool, rows: int, request: dict[str, Any]
) -> list[str]:
    """The styles that can hold the model, of those wanted, before anything is trained.

    Raises BadInput that names the layer to blame if there is none.
    """
    scale = InputScale.of(numbers, of_table)
    network = QuantisedNetwork(circuit, scale, scale.normalised(numbers[:_ROWS_AT_ONCE]))
    network.choose_scales(same_widths(circuit.layers, _REFERENCE_BITS))
    model, most = network.integer_model(), request["capacity"]
    bits = adder_bits(model)
    weights = [layer.weights.size for layer in model.layers]
    products = [layer.shape.count * layer.shape.terms for layer in model.layers]
    fits = {
        "pipelined": cells_of_adders(sum(bits), "ecp5") <= most["cells"],
        "sequential": sum(weights) <= most["weights"] and sum(products) * rows <= most["cycles"],
    }
    found = [style for style in request["styles"] if fits[style]]
    if found:
        return found
    of_layers: dict[str, tuple[list[Any], str, float, float]] = {
        "pipelined": (bits, "cells", cells_of_adders(sum(bits), "ecp5"), most["cells"]),
        "sequential": (products, "products", sum(products), most["cycles"] / rows),
    }
    sizes, unit, total, allowed = of_layers[request["styles"][0]]
    at = int(np.argmax(sizes))
    shape = model.layers[at].shape
    share = sizes[at] / sum(sizes) * total
    raise BadInput(
        f"model: its layer {shape.name!r} ({shape.kind}, {_shown(shape.inputs)} to "
        f"{_shown(shape.outputs)}) alone takes about {share:,.0f} {unit}, the whole model "
        f"{total:,.0f}; allowed for --to rtl: {allowed:,.0f} {unit}, for the largest of the FPGAs, "
        f"or a sequential circuit with at most {most['weights']:,.0f} weights and "
        f"{most['cycles'] / rows:,.0f} products"
    )


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def _chosen(
    tuned: list[Tuned],
    validation: dict[str, Array],
    exact: Array,
    metric: Callable[[Array], float],
    request: dict[str, Any],
) -> tuple[Tuned, float, float]:
    """The first model within the tolerance, the trained metric and its own. Raises BadInput."""
    name, tolerance = request["metric"], request["tolerance"]
    trained, value = metric(exact), 0.0
    for one in tuned:
        value = metric(_outputs(one.model, validation))
        if worsening(name, trained, value) <= tolerance:
            return one, trained, value
    raise BadInput(
        f"export: with {tuned[-1].widths.inputs}-bit integers the {name} is {value:.4g}, trained "
        f"{trained:.4g}; allowed: a higher --tolerance than {tolerance:g}, or a model trained for "
        "smaller numbers"
    )


def _outputs(model: IntegerModel, arrays: dict[str, Array]) -> Array:
    return model.outputs(model.run(model.prepare(arrays)))


def _metric(
    definition: ModelDefinition, targets: Array, schema: DataSchema, request: dict[str, Any]
) -> Callable[[Array], float]:
    """The job's metric of outputs, as the validation of a training computes it."""
    name, wanted = request["metric"], torch.from_numpy(targets)
    if name == "loss":
        loss = loss_function(definition, schema.task)
        return lambda outputs: float(loss(torch.from_numpy(outputs).float(), wanted))

    def value(outputs: Array) -> float:
        first, classes = float(targets.reshape(-1)[0]), len(schema.classes or ())
        sums = sums_of(schema.task, classes, first, torch.device("cpu"), request["naive"])
        assert sums is not None  # the run has the metric
        sums.add(torch.from_numpy(outputs), wanted)
        return sums.found(len(targets)).metrics[name]

    return value
