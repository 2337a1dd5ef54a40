"""An ensemble for tables in one network, whose members share all large weights.

Y. Gorishniy et al., "TabM" (2024): each member has its own scales, biases and output layer.
"""

from __future__ import annotations

from typing import Any

from trainwright.tasks.recommend.source_code import Header
from trainwright.tasks.recommend.templates.table_parts import (
    TableColumns,
    batch_size,
    epochs,
    table_source,
)
from trainwright.tasks.recommend.templates.template import ModelConfig, Template
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

_MODEL = r'''
class Shared(nn.Module):
    """A linear layer that all members share, but for scales of inputs and outputs, and biases."""

    def __init__(self, scales: Tensor, outputs: int) -> None:
        super().__init__()
        members, inputs = scales.shape
        self.weight = nn.Parameter((2 * torch.rand(outputs, inputs) - 1) * inputs**-0.5)
        self.bias = nn.Parameter((2 * torch.rand(members, outputs) - 1) * inputs**-0.5)
        self.before = nn.Parameter(scales)
        self.after = nn.Parameter(torch.ones(members, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x * self.before, self.weight) * self.after + self.bias


class Model(nn.Module):
    """Columns as numbers, waves and embeddings; layers of all members; a last layer for each."""

    def __init__(self, members: int, width: int, layers: int) -> None:
        super().__init__()
        self.table, self.drop = Table(), nn.Dropout(0.1)
        #? numbers
        # Of each number x also 3 sums of 16 waves cos(f x + p)
        features = $features
        self.frequency = nn.Parameter(torch.randn(features, 16))
        self.phase = nn.Parameter(math.pi * (2 * torch.rand(features, 16) - 1))
        self.waves = nn.Parameter((torch.rand(features, 16, 3) - 0.5) / 2)
        #? categories
        first = (torch.eye(n)[:, 1:] if n <= 9 else torch.randn(n, 8) for n in CODES)
        self.embed = nn.ParameterList(first)
        #?
        signs = 2.0 * torch.randint(2, (members, $sizes)) - 1
        scales = [signs, *(torch.ones(members, width) for _ in range(layers - 1))]
        self.shared = nn.ModuleList(Shared(one, width) for one in scales)
        self.out = nn.Parameter((2 * torch.rand(members, width, $outputs) - 1) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(members, $outputs))

    def forward(self, inputs: Inputs) -> Tensor:
        #? numbers
        numbers = self.table.scaled(inputs$of_numbers)
        waves = (numbers[:, :, None] * self.frequency + self.phase).cos()
        parts = [numbers, torch.einsum("rnw,nws->rns", waves, self.waves).flatten(1)]
        #? !numbers
        parts = []
        #? categories
        codes = inputs$of_categories.unbind(1)
        parts += [functional.embedding(*pair) for pair in zip(codes, self.embed, strict=True)]
        #?
        x = torch.cat(parts, 1)[:, None, :]
        for layer in self.shared:
            x = self.drop(layer(x).relu())
        outputs = torch.einsum("rmw,mwo->rmo", x, self.out) + self.bias
        #? classes
        logs = outputs.log_softmax(2)
        # Members learn each by itself; together they predict the mean of their probabilities.
        return logs.mean(1) if self.training else logs.logsumexp(1) - math.log(len(self.out))
        #? !classes
        # Members learn each by itself; together they predict their mean.
        return self.table.in_unit(outputs[:, :, 0] if self.training else outputs.mean((1, 2)))
        #?


def build_model(members: int = $members, width: int = $width, layers: int = $layers) -> Model:
    """A model without knowledge of the data; `adapt` gives it that."""
    return Model(members, width, layers)
'''

_LOSS = '''
#? classes
def loss(outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The mean over the batch. Only training smooths labels, by the job's `label_smoothing`."""
    mean = functional.nll_loss(outputs, targets)
    if label_smoothing:
        mean = (1 - label_smoothing) * mean - label_smoothing * outputs.mean()
    return mean
#? !classes
def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the batch, and over the members while training."""
    wanted = targets[:, None].expand_as(outputs) if outputs.ndim > 1 else targets
    return functional.mse_loss(outputs, wanted)
#?
'''


def _source(schema: DataSchema, config: ModelConfig, header: Header) -> str:
    columns = TableColumns.of(schema)
    numbers = len(columns.numbers) + len(columns.gaps)
    values = {
        "sizes": str(4 * numbers + sum(min(8, count - 1) for count in columns.codes)),
        **{name: repr(value) for name, value in config.items()},
    }
    math = bool(columns.numbers or columns.classes)
    return table_source(
        columns, "TabM", _MODEL, header, loss=_LOSS, facts={"math": math}, values=values
    )


def _recipe(schema: DataSchema, config: ModelConfig) -> dict[str, Any]:
    return {
        "train.optimizer": {"name": "adamw", "weight_decay": 0.0003},
        "train.learning_rate": 0.002,
        "train.schedule": "flat-cosine",
        "train.clip_norm": 1.0,
        "train.global_batch_size": batch_size(schema),
        "train.epochs": epochs(schema, 2_000_000, most=100),
    }


TABM = Template(
    name="tabm",
    tasks=("tabular-classification", "tabular-regression"),
    sizes={
        "small": {"members": 8, "width": 96, "layers": 2},
        "medium": {"members": 16, "width": 128, "layers": 3},
        "large": {"members": 32, "width": 256, "layers": 3},
    },
    source=_source,
    recipe=_recipe,
)
