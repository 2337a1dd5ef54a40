"""What a GPU's step calls, against the CPU's step that was traced."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.estimator.predict.gpu_step import step_on_gpu
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.trace import trace
from trainwright.estimator.trace.training_step import TrainingStepSpec


class Tokens(nn.Module):
    """A layer over tokens; the last one is classified."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(24, 5)

    def forward(self, inputs: torch.Tensor) -> Any:
        found = self.layer(inputs)
        return self.head((found[0] if isinstance(found, tuple) else found)[:, -1])


def traced(layer: nn.Module, optimizer: str = "adam", tokens: int = 12) -> Structure:
    definition = ModelDefinition(
        lambda: Tokens(layer),
        lambda size: (torch.rand(size, tokens, 16), torch.zeros(size).long()),
        nn.functional.cross_entropy,
    )
    return trace(TrainingStepSpec(definition, {}, None, {"name": optimizer}), 8)


def flops(structure: Structure) -> float:
    return sum(one.count * one.flops(8) for one in structure.trace)


def kinds(structure: Structure) -> Counter[str]:
    found = Counter[str]()
    for one in structure.trace:
        found[one.kind] += one.count
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_an_update_is_one_call_of_each_kind_for_all_parameters(optimizer: str) -> None:
    structure = traced(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 24)), optimizer)
    found = step_on_gpu(structure)
    lists = {kind: count for kind, count in kinds(found).items() if "_foreach_" in kind}
    assert set(lists.values()) == {1}
    single = {kind.replace("_foreach_", "").rstrip("_") for kind in lists}
    assert single <= {kind.rstrip("_") for kind in kinds(structure)}
    # Views apart, what layers call is as it was.
    before = {place: structure.trace[place].kind for place in range(len(structure.trace))}
    for old, new in zip(structure.layer_work, found.layer_work, strict=True):
        assert [(before[place], count) for place, count in old.forward] == [
            (found.trace[place].kind, count) for place, count in new.forward
        ]
    assert flops(found) == flops(structure)


@pytest.mark.parametrize("layer", [nn.GRU, nn.RNN])
@pytest.mark.parametrize("deep", [{"num_layers": 1}, {"num_layers": 2, "bias": False}])
def test_a_recurrent_layer_is_one_call_in_each_direction(layer: Any, deep: dict[str, Any]) -> None:
    structure = traced(layer(16, 24, batch_first=True, **deep))
    found = step_on_gpu(structure)
    rnn = {one.kind: one for one in found.trace if one.family == "rnn"}
    assert {kind: one.count for kind, one in rnn.items()} == {
        "aten._cudnn_rnn": 1,
        "aten._cudnn_rnn_backward": 1,
    }
    sizes = {name: line(8) for name, line in rnn["aten._cudnn_rnn"].dims.items()}
    assert sizes == {"steps": 12, "batch": 8, "inputs": 16, "hidden": 24, "backward": 0}
    assert flops(found) == pytest.approx(flops(structure))
    assert found.fingerprint() == structure.fingerprint()


def test_a_gpus_time_grows_with_a_sequences_work_and_not_with_its_calls() -> None:
    def seconds(tokens: int) -> float:
        structure = traced(nn.GRU(16, 24, batch_first=True), tokens=tokens)
        return predict_curve(structure, None, device_type="nvidia-t4").step_time(8).median

    assert seconds(32) < 1.2 * seconds(4)


def test_without_layers_nothing_changes() -> None:
    structure = traced(nn.GRU(16, 24, batch_first=True)).model_copy(update={"layer_work": []})
    assert step_on_gpu(structure) == structure
