"""The breadth of models that can be traced."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trainwright.estimator.errors import BadInput
from trainwright.estimator.memory.step_memory import peak_bytes
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.trace import trace
from trainwright.estimator.trace.training_step import TrainingStepSpec

Example = Callable[[int], tuple[Any, Any]]


def traced(
    build: Callable[[], nn.Module],
    example: Example,
    batch_size: int = 4,
    loss: Any = None,
    **options: Any,
) -> Structure:
    options = {"optimizer": {"name": "adamw"}} | options
    return trace(
        TrainingStepSpec(ModelDefinition(build, example, loss), {}, None, **options), batch_size
    )


def classes(inputs: Callable[[int], Any], count: int = 10) -> Example:
    return lambda batch: (inputs(batch), torch.zeros(batch, dtype=torch.long))


class LanguageModel(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = (
            nn.Embedding(100, 16),
            kind(16, 24, 2, batch_first=True),
            nn.Linear(24, 10),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens))[0].mean(1))


class Recommender(nn.Module):
    """Tables of categories beside numbers, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.top = nn.Linear(3 * 8 + 5, 10)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        tables = [bag(inputs["ids"][:, place]) for place, bag in enumerate(self.bags)]
        return self.top(torch.cat([*tables, inputs["numbers"]], 1))


class Pair(nn.Module):
    """Takes a tuple as its one argument, returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(6, 7, 10)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"scores": self.layer(*inputs)}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return Square.apply(self.layer(x))


class StochasticDepth(nn.Module):
    """Reads a table and truncated normal values while it is built, as ViTs do."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = torch.linspace(0, 0.3, 4).tolist()
        self.places = torch.arange(16).view(4, 4).t().reshape(-1).tolist()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in self.rates))
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x[:, self.places])[:, :10]


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.down(x).relu()
        return self.head(torch.cat([one, self.up(self.inner(functional.max_pool2d(one, 2)))], 1))


class Blocks(nn.Module):
    """Twelve equal blocks, whose activations are kept or recomputed."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(12)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


def mixture() -> nn.Module:
    """Control flow that does not depend on values: every second expert."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.gate = (
                nn.ModuleList(nn.Linear(8, 10) for _ in range(4)),
                nn.Linear(8, 4),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = self.gate(x).softmax(-1)
            return sum(
                weights[:, n : n + 1] * one(x) for n, one in enumerate(self.experts) if n % 2 == 0
            )  # type: ignore[return-value]

    return Mixture()


def tokens(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 12, dtype=torch.long)


MODELS: dict[str, tuple[Callable[[], nn.Module], Example, Any]] = {
    "lstm": (lambda: LanguageModel(nn.LSTM), classes(tokens), None),
    "gru": (lambda: LanguageModel(nn.GRU), classes(tokens), None),
    "recommender": (
        Recommender,
        classes(
            lambda batch: {
                "ids": torch.zeros(batch, 3, 4, dtype=torch.long),
                "numbers": torch.rand(batch, 5),
            }
        ),
        None,
    ),
    "tuple and dict": (
        Pair,
        classes(lambda batch: (torch.rand(batch, 6), torch.rand(batch, 7))),
        lambda outputs, targets: functional.cross_entropy(outputs["scores"], targets),
    ),
    "custom function": (Custom, classes(lambda batch: torch.rand(batch, 8)), None),
    "looks while it is built": (
        StochasticDepth,
        classes(lambda batch: torch.rand(batch, 16)),
        None,
    ),
    "unet": (
        Unet,
        lambda batch: (torch.rand(batch, 3, 16, 16), torch.zeros(batch, 16, 16, dtype=torch.long)),
        None,
    ),
    "transformer": (
        lambda: nn.Sequential(
            nn.Embedding(50, 32),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
            nn.Flatten(),
            nn.Linear(12 * 32, 10),
        ),
        classes(tokens),
        None,
    ),
    "mixture": (mixture, classes(lambda batch: torch.rand(batch, 8)), None),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_traced_with_fake_tensors_and_agrees_with_torchs_counts(name: str) -> None:
    build, example, loss = MODELS[name]
    structure = traced(build, example, 4, loss)
    assert structure.method == "fake tensors"
    model, (inputs, _) = build(), example(4)
    assert structure.parameters == sum(one.numel() for one in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(inputs)
    assert structure.forward_flops_per_sample * 4 == pytest.approx(counter.get_total_flops())
    assert sum(one.forward_flops for one in structure.layers) == pytest.approx(
        counter.get_total_flops()
    )
    assert sum(one.parameters for one in structure.layers) == structure.parameters
    assert sum(one.count for one in structure.trace) == sum(structure.operations.values())
    assert peak_bytes(structure, 8) > peak_bytes(structure, 4) > structure.idle_bytes(4) > 0


@pytest.mark.parametrize("name", MODELS)
def test_every_operation_before_the_update_belongs_to_one_layer_and_phase(name: str) -> None:
    build, example, loss = MODELS[name]
    structure = traced(build, example, 4, loss)
    forward, all_of_it = Counter[int](), Counter[int]()
    for layer in structure.layer_work:
        for phase in (layer.forward, layer.input_gradient, layer.weight_gradient):
            for operation, count in phase:
                all_of_it[operation] += count
        for operation, count in layer.forward:
            forward[operation] += count
    # What remains is the optimizer's.
    rest = {
        number: one.count - all_of_it[number]
        for number, one in enumerate(structure.trace)
        if one.count - all_of_it[number] > 1e-9
    }
    assert all(count <= structure.trace[number].count for number, count in all_of_it.items())
    assert all(
        structure.trace[number].kind.startswith(("aten._foreach", "aten.")) for number in rest
    )
    assert not any(structure.trace[number].flops(4) for number in rest)
    names = {one.name: one.forward_flops for one in structure.layers}
    for layer in structure.layer_work:
        flops = sum(
            count * structure.trace[operation].flops(4)
            for operation, count in layer.forward
            if structure.trace[operation].family != "rnn"
        )
        assert flops == pytest.approx(names.get(layer.name, 0.0)), layer.name
    own = [one for layer in structure.layer_work for one in layer.parameters]
    trained = dict(build().named_parameters())
    assert len(own) == len(set(own))
    assert set(own) <= trained.keys()


@pytest.mark.parametrize(
    ("optimizer", "states"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2)]
)
def test_the_optimizers_state_counts(optimizer: str, states: int) -> None:
    structure = traced(
        Custom, classes(lambda batch: torch.rand(batch, 8)), 4, optimizer={"name": optimizer}
    )
    parameters = structure.parameter_bytes
    batch = 4 * 8 * 4 + 4 * 8
    held = (2 + states) * parameters + batch
    assert structure.idle_bytes(4) == pytest.approx(
        held, abs=100
    )  # the step counts are a few bytes more


@pytest.mark.parametrize(("precision", "item"), [("fp32", 4), ("fp64", 8), ("bf16", 2), ("amp", 4)])
def test_precisions_change_parameters_and_arithmetic(precision: str, item: int) -> None:
    def example(batch: int) -> tuple[Any, Any]:
        return torch.rand(batch, 8), torch.zeros(batch, dtype=torch.long)

    structure = traced(lambda: nn.Linear(8, 10), example, 4, precision=precision)
    assert structure.parameter_bytes == item * structure.parameters
    products = {one.dtype for one in structure.trace if one.family == "matmul"}
    assert products == {
        "bfloat16" if precision in ("bf16", "amp") else {4: "float32", 8: "float64"}[item]
    }


def test_accumulation_repeats_forward_and_backward_and_needs_less_memory() -> None:
    def example(batch: int) -> tuple[Any, Any]:
        return torch.rand(batch, 64), torch.zeros(batch, dtype=torch.long)

    whole, parts = (
        traced(lambda: Blocks(False), example, 4096, accumulation=count) for count in (1, 4)
    )
    assert parts.operations["aten.addmm"] == 4 * whole.operations["aten.addmm"]
    assert peak_bytes(parts, 4096) < 0.5 * peak_bytes(whole, 4096)
    with pytest.raises(
        BadInput, match="accumulation: got 3; allowed: a divisor of the batch size 4096"
    ):
        traced(lambda: Blocks(False), example, 4096, accumulation=3)


def test_recomputed_activations_cost_time_and_save_memory() -> None:
    def example(batch: int) -> tuple[Any, Any]:
        return torch.rand(batch, 64), torch.zeros(batch, dtype=torch.long)

    kept, again = (
        traced(lambda value=value: Blocks(value), example, 2048) for value in (False, True)
    )
    assert again.method == "fake tensors"
    assert (
        again.operations["aten.addmm"] == kept.operations["aten.addmm"] + 12
    )  # the first layer of each block
    assert again.activation_bytes_per_sample < 0.4 * kept.activation_bytes_per_sample
    assert peak_bytes(again, 2048) < 0.5 * peak_bytes(kept, 2048)


LARGE = """
import sys, torch
from torch import nn
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.trace import trace
from trainwright.estimator.trace.training_step import TrainingStepSpec

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50_000, 1536)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(1536, 16, 6144, batch_first=True) for _ in range(32)
        )
        self.head = nn.Linear(1536, 50_000)
    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)

def example(batch):
    return torch.zeros(batch, 512, dtype=torch.long), torch.zeros(batch * 512, dtype=torch.long)

spec = TrainingStepSpec(ModelDefinition(Decoder, example, None), {}, None, {"name": "adamw"})
structure = trace(spec, 32)
# Not ru_maxrss: it would count what the parent held when it started this process.
status = open("/proc/self/status").read()
most_kib = int(status.partition("VmHWM:")[2].split()[0])
print(structure.method, structure.parameters, most_kib * 1024)
"""


@pytest.mark.slow
def test_a_transformer_of_a_billion_parameters_is_traced_in_less_than_a_gigabyte() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, timeout=300
    )
    method, parameters, most = done.stdout.rsplit(maxsplit=2)[0].strip(), *done.stdout.split()[-2:]
    assert method == "fake tensors"
    assert int(parameters) > 1e9
    assert int(most) < 1e9
