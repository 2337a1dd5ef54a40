"""Linear models for tables: logistic regression, and least squares."""

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
class Model(nn.Module):
    """One weight for each number, and one for each value of a category."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.bias = nn.Parameter(torch.zeros($outputs))
        #? numbers
        self.numbers = nn.Linear($features, $outputs, bias=False)
        #? categories
        self.categories = nn.Embedding(sum(CODES), $outputs)
        self.offsets = nn.Buffer(torch.tensor([0, *CODES[:-1]]).cumsum(0))
        #?

    def forward(self, inputs: Inputs) -> Tensor:
        outputs: Tensor = self.bias
        #? numbers
        outputs = outputs + self.numbers(self.table.scaled(inputs$of_numbers))
        #? categories
        outputs = outputs + self.categories(inputs$of_categories + self.offsets).sum(1)
        #? classes
        return outputs
        #? !classes
        return self.table.in_unit(outputs.squeeze(1))
        #?

    def start(self, targets: Tensor) -> None:
        """Start where every row has the same prediction."""
        for parameter in self.parameters():
            parameter.zero_()
        #? classes
        counts = targets.bincount(minlength=CLASSES) + 1
        self.bias.copy_((counts / counts.sum()).log())
        #?


def build_model() -> Model:
    """A model without knowledge of the data; `adapt` gives it that."""
    return Model()
'''


def _source(schema: DataSchema, config: ModelConfig, header: Header) -> str:
    return table_source(
        TableColumns.of(schema), "Linear model", _MODEL, header, start="model.start(targets)"
    )


def _recipe(schema: DataSchema, config: ModelConfig) -> dict[str, Any]:
    return {
        "train.optimizer": {"name": "adam", "betas": [0.9, 0.95]},
        "train.learning_rate": 0.01,
        "train.schedule": "flat-cosine",
        "train.global_batch_size": batch_size(schema),
        "train.epochs": epochs(schema, 200_000, most=100),
    }


LINEAR = Template(
    name="linear",
    tasks=("tabular-classification", "tabular-regression"),
    sizes={"small": {}, "medium": {}, "large": {}},
    source=_source,
    recipe=_recipe,
)
