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
    text_assignment,
    texts_literal,
)
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

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
            [max(2, column.vocabulary) for column in categories],
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
    loss: str | None = None,
    start: str = "",
    facts: Mapping[str, bool] = MappingProxyType({}),
    values: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The source of a model for a table. `kind`: words for its first line, such as `Linear model`.

    `model` is code as in `source_code.finished`: `class Model` and `build_model`. A Model has the
    attribute `table`, a Table, and returns logits, (rows, classes), or numbers in the target's
    unit, (rows,). `loss`: its function `loss`, if not that for such outputs. `start`: a call that
    sets the initial state of `model` from `inputs` and `targets`, if it needs one.
    """
    classes = columns.classes
    shared = {
        "target": text_assignment("TARGET", columns.target),
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
        "start": start,
        "inputs": "dict[str, Tensor]" if columns.numbers and columns.categories else "Tensor",
    }
    title = f"{kind} for {shown(columns.target, 30)}."
    literals = "".join(
        shared[name] for name in ("target", "numbers", "gaps", "categories", "codes")
    )
    uses_json = classes is not None or "json.loads" in literals
    return finished(
        f"{_START}\n\n{model.strip()}\n\n\n{(loss or _LOSS).strip()}\n\n\n{_END.strip()}",
        {
            **columns.facts,
            "json": uses_json,
            "math": bool(columns.numbers),
            "itertools": "itertools." in model,
            "start": bool(start),
            **facts,
        },
        {**shared, **values},
        title,
        header,
    )


def batch_size(schema: DataSchema) -> int:
    """Small tables get small batches, and so more steps."""
    return 64 if schema.train_rows < 20_000 else 256


def epochs(schema: DataSchema, samples: int, most: int) -> int:
    """Passes over the training rows that take about this many samples; at least 10."""
    return min(most, max(10, round(samples / max(1, schema.train_rows))))


_START = r'''
from __future__ import annotations

#? categories
import hashlib
#? itertools
import itertools
#? json
import json
#? math
import math
#?
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Inputs = $inputs
$target
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
    """What training rows say of the columns; `adapt` sets these buffers."""

    def __init__(self) -> None:
        super().__init__()
        #? numbers
        self.centre = nn.Buffer(torch.zeros(len(NUMBERS)))
        self.scale = nn.Buffer(torch.ones(len(NUMBERS)))
        #? categories
        self.hashes = nn.Buffer(torch.zeros(sum(CODES) - len(CODES), dtype=torch.int64))
        #? classes
        self.class_names = nn.Buffer(torch.full((CLASS_BYTES,), 32, dtype=torch.uint8))
        #? !classes
        # The target's mean and deviation; its lowest and highest value in deviations from the mean
        self.target = nn.Buffer(torch.tensor([0, 1, -1e9, 1e9]))
    #? numbers

    def scaled(self, numbers: Tensor) -> Tensor:
        #? numbers gaps
        """Numbers around 0, of at most 3 in size; then 1 for each missing one of GAPS."""
        #? numbers !gaps
        """Numbers around 0, of at most 3 in size; 0 for missing ones."""
        #? numbers
        missing = numbers.isnan()
        scaled = torch.where(missing, 0, (numbers - self.centre) * self.scale).clamp(-1e6, 1e6)
        #? numbers gaps
        clipped = scaled / (1 + (scaled / 3).square()).sqrt()
        return torch.cat([clipped, missing[:, GAPS].to(clipped.dtype)], 1)
        #? numbers !gaps
        return scaled / (1 + (scaled / 3).square()).sqrt()
    #? !classes

    def in_unit(self, outputs: Tensor) -> Tensor:
        """Standardised outputs in the target's unit, while not training within its range."""
        mean, deviation, low, high = self.target.unbind()
        outputs = outputs.to(mean.dtype)
        if not self.training:
            return mean + deviation * outputs.clamp(low, high)
        # The gradient is that of the squared error of standardised targets, for any unit.
        change = (outputs - outputs.detach()) / deviation
        return (mean + deviation * outputs).detach() + change
    #?

    def encode(self, rows: dict[str, list[Any]]) -> Inputs:
        """The inputs for raw rows by column; None is missing, as unknown categories are."""
        #? numbers
        values = [[math.nan if v is None else float(v) for v in rows[name]] for name in NUMBERS]
        numbers = torch.tensor(values, dtype=torch.float64).T.to(self.centre)
        #? categories
        known, columns = self.hashes.tolist(), []
        for name, count in zip(CATEGORIES, CODES, strict=True):
            codes, known = dict(zip(known, range(1, count), strict=False)), known[count - 1 :]
            columns.append([0 if one is None else codes.get(hashed(one), 0) for one in rows[name]])
        categories = torch.tensor(columns, dtype=torch.int64).T.to(self.hashes)
        #? numbers categories
        return {"numbers": numbers, "categories": categories}
        #? numbers !categories
        return numbers
        #? !numbers categories
        return categories
        #?
'''

_LOSS = '''
#? classes
def loss(outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The mean over the batch. Only training smooths labels, by the job's `label_smoothing`."""
    return functional.cross_entropy(outputs, targets, label_smoothing=label_smoothing)
#? !classes
def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the batch."""
    return functional.mse_loss(outputs, targets)
#?
'''
_END = r'''
def example_batch(batch_size: int) -> tuple[Inputs, Tensor]:
    """Random inputs and targets."""
    #? classes
    targets = torch.randint(CLASSES, (batch_size,))
    #? !classes
    targets = torch.randn(batch_size)
    #? numbers
    numbers = torch.randn(batch_size, len(NUMBERS))
    #? categories
    categories = (torch.rand(batch_size, len(CODES)) * torch.tensor(CODES)).long()
    #? numbers categories
    return {"numbers": numbers, "categories": categories}, targets
    #? numbers !categories
    return numbers, targets
    #? !numbers categories
    return categories, targets
    #?


def adapt(model: Model, inputs: Inputs, targets: Tensor, names: dict[str, list[str]]) -> None:
    """Set buffers and initial weights from training rows; `names` has the values by code."""
    table = model.table
    #? numbers
    numbers = inputs$of_numbers.double()
    marks = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=numbers.dtype, device=numbers.device)
    low, first, middle, third, high = torch.nanquantile(numbers, marks, 0).nan_to_num()
    spread = torch.where(third > first, third - first, (high - low) / 2)
    table.centre.copy_(middle)
    table.scale.copy_(torch.where(spread > 0, 1 / spread, 0))
    #? categories
    start = 0
    for name, count in zip(CATEGORIES, CODES, strict=True):
        known = [hashed(value) for value in names.get(name, [])]
        if len(known) >= count:
            raise ValueError(f"{name!r} has {len(known)} values; this file is for {count - 1}")
        table.hashes[start : start + len(known)] = torch.tensor(known, dtype=torch.int64)
        start += count - 1
    #? classes
    text = json.dumps(names[TARGET]) if TARGET in names else ""
    if len(text) > CLASS_BYTES:
        raise ValueError(f"{TARGET!r} has other classes than those that this file is for")
    table.class_names[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    #? !classes
    mean, deviation = targets.double().mean(), targets.double().std(correction=0).clamp(min=1e-12)
    ends = [(end - mean) / deviation for end in targets.aminmax()]
    table.target.copy_(torch.stack([mean, deviation, *ends]))
    #? start
    $start
    #?


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
    found = [names[one] for one in best.tolist()]
    return {"prediction": found, "probability": probability.tolist()}
    #? !classes
    return {"prediction": outputs.tolist()}
    #?


if __name__ == "__main__":
    model = build_model()
    with torch.no_grad():
        adapt(model, *example_batch(256), {})
    sys.stdout.write(f"{model}\n{sum(one.numel() for one in model.parameters()):,} parameters\n")
    sys.stdout.write(f"{predict(model, {name: [None] for name in $column_names})}\n")
'''
