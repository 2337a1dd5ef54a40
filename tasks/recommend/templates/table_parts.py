"""What the sources of all models for tables share.

A table's columns become `Table`: buffers with the scales of numbers, the vocabularies and the names
of classes, set once by `adapt`. `Table.forward` makes from a batch its scaled numbers, without
missing values and with an indicator for each column that had some, and its category codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trainwright.tasks.errors import BadInput
from trainwright.tasks.recommend.source_code import (
    Header,
    class_bytes,
    finished,
    numbers_literal,
    shown,
    text_literal,
    texts_literal,
)
from trainwright.tasks.runs.artefacts import DataSchema

_TASKS = ("tabular-classification", "tabular-regression")


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table as a model gets them."""

    target: str
    numbers: list[str]
    gaps: list[int]
    """which of the numbers have missing values"""
    categories: list[str]
    codes: list[int]
    """by category: the number of its codes, 0 for missing and unknown values among them"""
    classes: list[str] | None

    @classmethod
    def of(cls, schema: DataSchema) -> TableColumns:
        """A schema's columns. Raises BadInput if it is not a table's."""
        kinds = {column.kind for column in schema.columns}
        if schema.task not in _TASKS or not kinds or kinds - {"number", "category"}:
            found = ", ".join(sorted(kinds)) or "no columns with names"
            raise BadInput(
                f"data: got {schema.task} with {found}; allowed for a model for tables: "
                f"{' or '.join(_TASKS)} with columns of numbers and categories"
            )
        numbers = [column for column in schema.columns if column.kind == "number"]
        categories = [column for column in schema.columns if column.kind == "category"]
        return cls(
            schema.target,
            [column.name for column in numbers],
            [place for place, column in enumerate(numbers) if column.missing],
            [column.name for column in categories],
            [max(1, column.vocabulary) for column in categories],
            schema.classes if schema.task.endswith("classification") else None,
        )

    @property
    def facts(self) -> dict[str, bool]:
        """What a template's lines may depend on."""
        return {
            "numbers": bool(self.numbers),
            "gaps": bool(self.gaps),
            "categories": bool(self.categories),
            "classes": self.classes is not None,
        }


def table_source(
    columns: TableColumns,
    kind: str,
    model: str,
    header: Header,
    *,
    facts: Mapping[str, bool] = MappingProxyType({}),
    values: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The source of a model for a table. `kind`: words for its first line, such as `Linear model`.

    `model` is code as in `source_code.finished`: `class Model`, `build_model` and `loss`. A Model
    has the attribute `table`, a Table, and a method `start(inputs, targets)`, which sets its
    initial state from training rows; it returns logits, (rows, classes), or numbers in the target's
    unit, (rows,).
    """
    classes = columns.classes
    shared = {
        "target": text_literal(columns.target),
        "numbers": texts_literal("NUMBERS", columns.numbers),
        "gaps": numbers_literal("GAPS", columns.gaps),
        "categories": texts_literal("CATEGORIES", columns.categories),
        "codes": numbers_literal("CODES", columns.codes),
        "classes": str(len(classes or [])),
        "class_bytes": str(class_bytes(classes or [])),
        "of_numbers": '["numbers"]' if columns.categories else "",
        "of_categories": '["categories"]' if columns.numbers else "",
        "outputs": "CLASSES" if classes else "1",
        "features": "len(NUMBERS) + len(GAPS)" if columns.gaps else "len(NUMBERS)",
        "column_names": " + ".join(
            name
            for name, there in (("NUMBERS", columns.numbers), ("CATEGORIES", columns.categories))
            if there
        ),
        "inputs": "dict[str, Tensor]" if columns.numbers and columns.categories else "Tensor",
    }
    title = f"{kind} of {shown(columns.target, 40)} by the columns of a table. Edit it as you like."
    literals = "".join(
        shared[name] for name in ("target", "numbers", "gaps", "categories", "codes")
    )
    uses_json = classes is not None or "json.loads" in literals
    return finished(
        f"{_START}\n\n{model.strip()}\n\n\n{_END.strip()}",
        {**columns.facts, "json": uses_json, **facts},
        {**shared, **values},
        title,
        header,
    )


_START = r'''
from __future__ import annotations

#? categories
import hashlib
#? json
import json
#? numbers
import math
#?
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Inputs = $inputs
TARGET = $target
#? numbers
$numbers
#? gaps
# Which of the numbers have missing values
$gaps
#? categories
$categories
# By category: 1 for missing and unknown values, code 0, and 1 for each known value
$codes
#? classes
CLASSES, CLASS_BYTES = $classes, $class_bytes
#? categories


def hashed(value: Any) -> int:
    """A category's value as a whole number of 64 bits."""
    text = str(value).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
#?


class Table(nn.Module):
    """What the training rows say of the columns, in buffers that `adapt` sets."""

    #? numbers
    centre: Tensor
    scale: Tensor
    #? categories
    hashes: Tensor
    #? classes
    class_names: Tensor
    #? !classes
    mean: Tensor
    deviation: Tensor
    range: Tensor
    #?

    def __init__(self) -> None:
        super().__init__()
        #? numbers
        self.register_buffer("centre", torch.zeros(len(NUMBERS)))
        self.register_buffer("scale", torch.ones(len(NUMBERS)))
        #? categories
        self.register_buffer("hashes", torch.zeros(sum(CODES) - len(CODES), dtype=torch.int64))
        #? classes
        self.register_buffer("class_names", torch.full((CLASS_BYTES,), 32, dtype=torch.uint8))
        #? !classes
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("deviation", torch.ones(()))
        self.register_buffer("range", torch.tensor([-1e9, 1e9]))
        #?

    def adapt(self, inputs: Inputs, targets: Tensor, names: dict[str, list[str]]) -> None:
        """Set the buffers from training rows; `names` are each column's values by code."""
        #? numbers
        numbers = inputs$of_numbers.double()
        marks = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=numbers.dtype, device=numbers.device)
        low, first, middle, third, high = torch.nanquantile(numbers, marks, 0).nan_to_num()
        spread = torch.where(third > first, third - first, (high - low) / 2)
        self.centre.copy_(middle)
        self.scale.copy_(torch.where(spread > 0, 1 / spread, 0))
        #? categories
        start = 0
        for name, count in zip(CATEGORIES, CODES, strict=True):
            known = [hashed(value) for value in names.get(name, [])]
            if len(known) >= count:
                raise ValueError(f"{name!r} has {len(known)} values; this file is for {count - 1}")
            self.hashes[start : start + len(known)] = torch.tensor(known, dtype=torch.int64)
            start += count - 1
        #? classes
        text = json.dumps(names[TARGET]) if TARGET in names else ""
        if len(text) > CLASS_BYTES:
            raise ValueError(f"{TARGET!r} has other classes than those that this file is for")
        self.class_names[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        #? !classes
        self.mean.copy_(targets.double().mean())
        self.deviation.copy_(targets.double().std())
        self.range.copy_((torch.stack([targets.min(), targets.max()]) - self.mean) / self.deviation)
        #?
    #? numbers

    def scaled(self, numbers: Tensor) -> Tensor:
        """Numbers around 0, of at most 3 in size; then 1 for each missing one of GAPS."""
        missing = numbers.isnan()
        scaled = torch.where(missing, 0, (numbers - self.centre) * self.scale).clamp(-1e6, 1e6)
        clipped = scaled / (1 + (scaled / 3).square()).sqrt()
        #? numbers gaps
        return torch.cat([clipped, missing[:, GAPS].to(clipped.dtype)], 1)
        #? numbers !gaps
        return clipped
    #? !classes

    def in_unit(self, outputs: Tensor) -> Tensor:
        """Standardised outputs in the target's unit, while not training within its range."""
        outputs = outputs.to(self.mean.dtype)
        if not self.training:
            outputs = outputs.clamp(self.range[0], self.range[1])
        # The gradient is that of the squared error of standardised targets, for any unit.
        through = (outputs - outputs.detach()) / self.deviation
        return (self.mean + self.deviation * outputs).detach() + through
    #?

    def encode(self, rows: dict[str, list[Any]]) -> Inputs:
        """The inputs for raw rows by column; None is missing, as unknown categories are."""
        #? numbers
        numbers = torch.tensor(
            [[math.nan if one is None else float(one) for one in rows[name]] for name in NUMBERS],
            dtype=self.centre.dtype,
            device=self.centre.device,
        ).T
        #? categories
        columns, known = [], torch.split(self.hashes, [count - 1 for count in CODES])
        for name, hashes in zip(CATEGORIES, known, strict=True):
            codes = {one: code for code, one in enumerate(hashes.tolist(), 1)}
            columns.append([0 if one is None else codes.get(hashed(one), 0) for one in rows[name]])
        categories = torch.tensor(columns, dtype=torch.int64, device=self.hashes.device).T
        #? numbers categories
        return {"numbers": numbers, "categories": categories}
        #? numbers !categories
        return numbers
        #? !numbers categories
        return categories
        #?
'''

_END = r'''
def example_batch(batch_size: int) -> tuple[Inputs, Tensor]:
    """Random inputs and targets."""
    #? numbers
    numbers = torch.randn(batch_size, len(NUMBERS))
    #? categories
    categories = torch.stack([torch.randint(count, (batch_size,)) for count in CODES], 1)
    #? classes
    targets = torch.randint(CLASSES, (batch_size,))
    #? !classes
    targets = torch.randn(batch_size)
    #? numbers categories
    return {"numbers": numbers, "categories": categories}, targets
    #? numbers !categories
    return numbers, targets
    #? !numbers categories
    return categories, targets
    #?


def adapt(model: Model, inputs: Inputs, targets: Tensor, names: dict[str, list[str]]) -> None:
    """Set scales, vocabularies and initial weights from rows of the training part."""
    model.table.adapt(inputs, targets, names)
    model.start(inputs, targets)


def predict(model: Model, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Predictions for raw rows, given and returned by column."""
    training = model.training
    model.eval()
    with torch.no_grad():
        outputs = model(model.table.encode(rows))
    model.train(training)
    #? classes
    text = bytes(model.table.class_names.tolist()).strip()
    names = json.loads(text) if text else list(range(CLASSES))
    probability, best = outputs.softmax(1).max(1)
    return {
        "prediction": [names[one] for one in best.tolist()],
        "probability": probability.tolist(),
    }
    #? !classes
    return {"prediction": outputs.tolist()}
    #?


if __name__ == "__main__":
    model = build_model()
    inputs, targets = example_batch(256)
    with torch.no_grad():
        adapt(model, inputs, targets, {})
    parameters = sum(one.numel() for one in model.parameters())
    columns = $column_names
    sys.stdout.write(f"{model}\n{parameters:,} parameters\n")
    sys.stdout.write(f"{predict(model, {name: [None] for name in columns})}\n")
'''
