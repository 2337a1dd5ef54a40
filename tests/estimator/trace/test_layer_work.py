"""What each layer does in a traced step: forward pass, input and weight gradients, sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainwright.estimator.structure import LayerWork, Structure
from trainwright.estimator.trace.source import BatchSpec, ModelDefinition
from trainwright.estimator.trace.trace import TrainingStepSpec, trace

VECTORS = BatchSpec(
    inputs={"inputs": (8,)},
    input_dtypes={"inputs": "float32"},
    target_dtype="int64",
    classes=4,
    task="tabular-classification",
)
TOKENS = VECTORS.model_copy(update={"input_dtypes": {"inputs": "int64"}})
IMAGES = VECTORS.model_copy(update={"inputs": {"inputs": (3, 6, 6)}})


def traced(
    build: Callable[[], nn.Module], spec: BatchSpec = VECTORS, accumulation: int = 1
) -> Structure:
    """The structure of a step of 16 samples."""
    what = TrainingStepSpec(
        ModelDefinition(lambda **_: build(), None, None),
        {},
        spec,
        {"name": "sgd"},
        accumulation=accumulation,
    )
    return trace(what, 16)


def by_name(structure: Structure) -> dict[str, LayerWork]:
    return {one.name: one for one in structure.layer_work}


def kinds(structure: Structure, calls: tuple[tuple[int, float], ...]) -> dict[str, float]:
    """Calls by operation, without those that cost nothing."""
    return {
        structure.trace[number].kind: count
        for number, count in calls
        if structure.trace[number].family != "view"
    }


def test_a_linear_layers_products_are_its_forward_pass_and_its_two_gradients() -> None:
    structure = traced(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    first, activation, last = (by_name(structure)[name] for name in ("0", "1", "2"))
    assert kinds(structure, last.forward) == {"aten.addmm": 1}
    assert kinds(structure, last.input_gradient) == {"aten.mm": 1}
    assert kinds(structure, last.weight_gradient) == {"aten.mm": 1, "aten.sum": 1}
    # The inputs of the model need no gradient.
    assert kinds(structure, first.input_gradient) == {}
    assert kinds(structure, first.weight_gradient) == {"aten.mm": 1, "aten.sum": 1}
    assert kinds(structure, activation.input_gradient) == {"aten.threshold_backward": 1}
    assert not activation.weight_gradient
    assert structure.layer_work[-1].name == "loss"


def test_a_convolution_makes_both_gradients_in_one_operation_unless_it_is_the_first() -> None:
    structure = traced(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ),
        IMAGES,
    )
    layers = by_name(structure)
    backward = "aten.convolution_backward"
    assert kinds(structure, layers["0"].weight_gradient) == {backward: 1}
    assert kinds(structure, layers["1"].weight_gradient) == {backward: 0.5}
    assert kinds(structure, layers["1"].input_gradient) == {backward: 0.5}
    pointwise = layers["1"].dense
    assert pointwise is not None
    assert (pointwise.kind, pointwise.rows_per_sample) == ("pointwise", 16)
    assert (pointwise.inputs, pointwise.outputs) == (8, 4)
    assert layers["0"].dense is None


def test_sizes_are_those_of_the_layers_own_results_and_parameters() -> None:
    structure = traced(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    first, activation = (by_name(structure)[name] for name in ("0", "1"))
    assert first.parameters == {"0.weight": 128, "0.bias": 16}
    assert first.parameter_bytes == 4 * (8 * 16 + 16)
    assert first.output_bytes(16) == first.output_bytes(1) * 16 == 4 * 16 * 16
    # The backward pass of ReLU needs its result, and so does that of the next layer: one tensor.
    # The result of the first layer is freed.
    assert (first.kept_bytes(16), activation.kept_bytes(16)) == (0, 4 * 16 * 16)
    dense = first.dense
    assert dense is not None
    assert (dense.kind, dense.rows_per_sample, dense.inputs, dense.outputs) == ("linear", 1, 8, 16)


class _Tied(nn.Module):
    """The table of its embedding is also the weight of its last product."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(4, 6), nn.Linear(6, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.middle(self.table(tokens)).mean(1), self.table.weight)


class _Again(nn.Module):
    """Calls one layer three times, one of them by another module's code."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.thrice = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.once(rows)
        for _ in range(3):
            rows = self.thrice(rows).tanh()
        return self.last(rows)


class _Changed(nn.Linear):
    """Not the product that its class says."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * 2


def test_a_parameter_that_two_layers_use_makes_both_shared() -> None:
    structure = traced(_Tied, TOKENS)
    layers = by_name(structure)
    assert layers["table"].shared
    assert layers["table"].parameters == {"table.weight": 24}
    assert layers["_Tied"].shared
    assert layers["_Tied"].parameters == {}
    assert not layers["middle"].shared
    dense = layers["table"].dense
    assert dense is not None
    assert (dense.kind, dense.rows_per_sample) == ("embedding", 8)


def test_a_layer_that_runs_several_times_is_one_layer_with_all_its_calls() -> None:
    structure = traced(_Again)
    layers = by_name(structure)
    assert (layers["once"].calls, layers["thrice"].calls) == (1, 3)
    assert kinds(structure, layers["thrice"].forward) == {"aten.addmm": 3}
    assert kinds(structure, layers["_Again"].forward) == {"aten.tanh": 3}
    assert not layers["thrice"].shared


def test_a_changed_product_is_none() -> None:
    structure = traced(lambda: nn.Sequential(_Changed(8, 8), nn.Linear(8, 4)))
    assert by_name(structure)["0"].dense is None


@pytest.mark.parametrize("accumulation", [1, 2])
def test_micro_batches_repeat_a_layers_calls(accumulation: int) -> None:
    structure = traced(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        accumulation=accumulation,
    )
    last = by_name(structure)["2"]
    assert kinds(structure, last.forward) == {"aten.addmm": accumulation}
    assert last.calls == 1
    dense = last.dense
    assert dense is not None
    assert dense.rows_per_sample == 1
