"""Factorisation machines with a network, for tables with many columns or many values.

X. He, T. Chua, "Neural Factorization Machines" (2017): the cost of all pairs of columns grows with
the number of columns only. Categories with many values share rows of their embeddings: H. Shi et
al., "Compositional Embeddings" (2020), by quotient and remainder.
"""

from __future__ import annotations

from typing import Any

from trainwright.tasks.recommend.source_code import Header
from trainwright.tasks.recommend.templates.table_parts import TableColumns, epochs, table_source
from trainwright.tasks.recommend.templates.template import ModelConfig, Template
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

_MODEL = r'''
class Model(nn.Module):
    """A vector for each number and each value of a category; a network on sums of pairs."""

    def __init__(self, size: int, width: int, rows: int) -> None:
        super().__init__()
        self.table = Table()
        #? numbers
        self.numbers = nn.Linear($features, size, bias=False)
        self.squares = nn.Parameter(torch.zeros($features, size))
        #? categories
        # A code is rows * quotient + remainder; both have vectors, which are added.
        remainders = torch.tensor([min(count, rows) for count in CODES])
        quotients = torch.tensor([(count - 1) // rows + 1 for count in CODES])
        self.rows, self.first = rows, nn.Buffer(remainders.cumsum(0) - remainders)
        self.second = nn.Buffer(quotients.cumsum(0) - quotients)
        self.remainder = nn.Embedding(int(remainders.sum()), size)
        self.quotient = nn.Embedding(int(quotients.sum()), size)
        nn.init.normal_(self.remainder.weight, std=0.1)
        nn.init.zeros_(self.quotient.weight)
        #?
        self.norm = nn.LayerNorm(2 * size)
        self.layers = nn.Sequential(
            nn.Linear(2 * size, width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(width, $outputs),
        )

    def forward(self, inputs: Inputs) -> Tensor:
        # Over pairs of columns with vectors v: sum of products = ((sum of v)² - sum of v²) / 2
        #? numbers
        numbers = self.table.scaled(inputs$of_numbers)
        total = self.numbers(numbers) + numbers.square() @ self.squares
        squares = numbers.square() @ self.numbers.weight.T.square()
        #? categories
        codes = inputs$of_categories
        vectors = self.remainder(codes % self.rows + self.first)
        vectors = vectors + self.quotient(codes // self.rows + self.second)
        #? numbers categories
        total, squares = total + vectors.sum(1), squares + vectors.square().sum(1)
        #? !numbers categories
        total, squares = vectors.sum(1), vectors.square().sum(1)
        #?
        pairs = (total.square() - squares) / 2
        outputs: Tensor = self.layers(self.norm(torch.cat([total, pairs], 1)))
        #? classes
        return outputs
        #? !classes
        return self.table.in_unit(outputs.squeeze(1))
        #?


def build_model(size: int = $size, width: int = $width, rows: int = $rows) -> Model:
    """A model without knowledge of the data; `adapt` gives it that."""
    return Model(size, width, rows)
'''


def _source(schema: DataSchema, config: ModelConfig, header: Header) -> str:
    values = {name: repr(value) for name, value in config.items()}
    return table_source(
        TableColumns.of(schema), "Factorisation machine", _MODEL, header, values=values
    )


def _recipe(schema: DataSchema, config: ModelConfig) -> dict[str, Any]:
    return {
        "train.optimizer": {
            "name": "adamw",
            "weight_decay": 0.01,
            "betas": [0.9, 0.95],
            "decay_exclude": "vectors",
        },
        "train.learning_rate": 0.003,
        "train.schedule": "flat-cosine",
        "train.global_batch_size": 256,
        "train.epochs": epochs(schema, 2_000_000, most=100),
    }


WIDE = Template(
    name="wide",
    tasks=("tabular-classification", "tabular-regression"),
    sizes={
        "small": {"size": 32, "width": 64, "rows": 1024},
        "medium": {"size": 64, "width": 128, "rows": 4096},
        "large": {"size": 128, "width": 256, "rows": 16384},
    },
    source=_source,
    recipe=_recipe,
)
