"""Multi-layer perceptrons for tables by the recipe RealMLP.

D. Holzmüller et al., "Better by default" (2024), with what a job can express: the schedule is
flat-cosine, and dropout stays constant.
"""

from __future__ import annotations

from typing import Any

from trainwright.tasks.recommend.source_code import Header
from trainwright.tasks.recommend.templates.table_parts import TableColumns, epochs, table_source
from trainwright.tasks.recommend.templates.template import ModelConfig, Template
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

_MODEL = r'''
class Dense(nn.Module):
    """A linear layer whose weights are of size 1; biases, divided by 10, change slower."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor, start: bool) -> Tensor:
        if start:  # give each output a deviation of 1, and its zero a place amid the rows of x
            self.bias.zero_()
            self.weight.div_(self(x, False).std(0, correction=0).clamp(min=1e-6)[:, None])
            rows = torch.randint(len(x), (5, len(self.bias)), device=x.device)
            shares = torch.empty_like(rows, dtype=x.dtype).exponential_()
            self.bias.copy_(-10 * (self(x, False).gather(0, rows) * shares / shares.sum(0)).sum(0))
        return functional.linear(x, self.weight * len(self.weight[0]) ** -0.5, self.bias * 0.1)


class Model(nn.Module):
    """Columns as numbers, waves and embeddings; a scale for each; dense layers."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.table, self.drop = Table(), nn.Dropout(dropout)
        #? numbers
        # Of each number x also 3 sums of 16 waves cos(f x + p); vectors, exempt from weight decay
        size = $size
        self.frequency = nn.Parameter(2 * math.pi * torch.randn(size))
        self.phase = nn.Parameter(10 * math.pi * (2 * torch.rand(size) - 1))
        self.waves = nn.Parameter(5 * torch.rand(3 * size) - 2.5)
        #? categories
        first = (torch.eye(n)[:, 1:] if n <= 9 else torch.randn(n, 8) for n in CODES)
        self.embed = nn.ParameterList(first)
        #?
        sizes = [$sizes, *[width] * layers]
        self.scale = nn.Parameter(torch.full((sizes[0],), 1 / 6))
        self.dense = nn.ModuleList(Dense(*pair) for pair in itertools.pairwise(sizes))
        self.alpha = nn.ParameterList(torch.full((width,), 10.0) for _ in range(layers))
        self.out = Dense(width, $outputs)

    def forward(self, inputs: Inputs, start: bool = False) -> Tensor:
        #? numbers
        numbers = self.table.scaled(inputs$of_numbers)
        frequency, phase = (0.1 * one.reshape(-1, 16) for one in (self.frequency, self.phase))
        waves = (numbers[:, :, None] * frequency + phase).cos()
        sums = torch.einsum("rnw,nws->rns", waves, 0.1 * self.waves.reshape(-1, 16, 3))
        parts = [numbers, sums.flatten(1)]
        #? !numbers
        parts = []
        #? categories
        codes = inputs$of_categories.unbind(1)
        parts += [functional.embedding(*pair) for pair in zip(codes, self.embed, strict=True)]
        #?
        x = torch.cat(parts, 1) * (6 * self.scale)
        for dense, alpha in zip(self.dense, self.alpha, strict=True):
            x = dense(x, start)
            x = self.drop(x + (functional.$function(x) - x) * 0.1 * alpha)
        outputs: Tensor = self.out(x, start)
        #? classes
        return outputs
        #? !classes
        return self.table.in_unit(outputs.squeeze(1))
        #?


def build_model(width: int = $width, layers: int = $layers, dropout: float = $dropout) -> Model:
    """A model without knowledge of the data; `adapt` gives it that."""
    return Model(width, layers, dropout)
'''


def _source(schema: DataSchema, config: ModelConfig, header: Header) -> str:
    columns = TableColumns.of(schema)
    numbers = len(columns.numbers) + len(columns.gaps)
    values = {
        "function": "selu" if columns.classes else "mish",
        "size": "16 * len(NUMBERS)" if not columns.gaps else "16 * (len(NUMBERS) + len(GAPS))",
        "sizes": str(4 * numbers + sum(min(8, count - 1) for count in columns.codes)),
        **{name: repr(value) for name, value in config.items()},
    }
    return table_source(
        columns, "RealMLP", _MODEL, header, start="model(inputs, start=True)", values=values
    )


def _recipe(schema: DataSchema, config: ModelConfig) -> dict[str, Any]:
    return {
        "train.optimizer": {
            "name": "adamw",
            "betas": [0.9, 0.95],
            "weight_decay": 0.02,
            "decay_exclude": "vectors",
        },
        "train.learning_rate": 0.04 if schema.classes else 0.2,
        "train.schedule": "flat-cosine",
        "train.global_batch_size": 256,
        "train.epochs": epochs(schema, 4_000_000, most=256),
        **({"train.label_smoothing": 0.1} if len(schema.classes or []) > 2 else {}),
    }


REALMLP = Template(
    name="realmlp",
    tasks=("tabular-classification", "tabular-regression"),
    sizes={
        "small": {"width": 128, "layers": 2, "dropout": 0.15},
        "medium": {"width": 256, "layers": 3, "dropout": 0.15},
        "large": {"width": 512, "layers": 3, "dropout": 0.15},
    },
    source=_source,
    recipe=_recipe,
)
