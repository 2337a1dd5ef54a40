"""Schemas of tables and rows for the tests of generated sources."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from trainwright.estimator.trace import source
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.tasks.recommend.source_code import Header, write_source
from trainwright.tasks.recommend.templates.template import Template
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema

HEADER = Header(
    data="4,454 rows, 13 columns, sha256 0a1b2c3d4e5f",
    why="Of all models, this one is the simplest.",
    command="trainwright recommend job.yaml",
)
VALUES = [["own", "rent"], ["a", "b", "größe", "it's"], [f"v{number:02}" for number in range(40)]]
"""the known values of categories"""
KINDS = [
    (numbers, categories, gaps, classes)
    for numbers, categories, gaps, classes in itertools.product(
        (0, 4), (0, 3), (False, True), (0, 2, 3)
    )
    if (numbers or categories) and (numbers or not gaps)
]
"""Numbers of columns of numbers, of categories; whether values are missing; number of classes."""


def schema(
    numbers: int, categories: int, gaps: bool, classes: int, names: list[str] | None = None
) -> DataSchema:
    """A table's schema. `names`: of the target, the numbers and the categories."""
    found = names or [
        "label",
        *(f"number {place}" for place in range(numbers)),
        *(f"category {place}" for place in range(categories)),
    ]
    columns = [
        Column(name=found[1 + place], kind="number", missing=int(gaps and place == 1))
        for place in range(numbers)
    ] + [
        Column(name=found[1 + numbers + place], kind="category", vocabulary=1 + len(VALUES[place]))
        for place in range(categories)
    ]
    return DataSchema(
        task="tabular-classification" if classes else "tabular-regression",
        rows=1000,
        train_rows=800,
        validation_rows=200,
        inputs={"numbers": (numbers,), "categories": (categories,)},
        input_dtypes={"numbers": "float32", "categories": "int64"},
        target=found[0],
        target_dtype="int64" if classes else "float32",
        classes=[f"class “{place}”" for place in range(classes)] or None,
        sha256="0a1b2c",
        columns=columns,
    )


def generated(template: Template, data: DataSchema, folder: Path) -> ModelDefinition:
    """The model of a template's medium size, loaded from its source."""
    text = template.source(data, template.sizes["medium"], HEADER)
    path = write_source(folder, text)
    return source.load(folder, path.name)


def rows(data: DataSchema, count: int = 300) -> dict[str, list[Any]]:
    """Raw rows by column, with the target; every tenth value is missing where some may be."""
    torch.manual_seed(0)
    names, made = vocabularies(data), dict[str, list[Any]]()
    for place, column in enumerate(data.columns):
        if column.kind == "number":
            made[column.name] = (torch.randn(count) * 10**place + 100).tolist()
        else:
            known = names[column.name]
            made[column.name] = [known[one] for one in torch.randint(len(known), (count,))]
        if column.missing or column.kind == "category":
            made[column.name][::10] = [None] * len(made[column.name][::10])
    signal = torch.arange(count) % 7
    made[data.target] = (
        [data.classes[int(one) % len(data.classes)] for one in signal]
        if data.classes
        else (signal * 1000.0 + 1e5).tolist()
    )
    return made


def vocabularies(data: DataSchema) -> dict[str, list[str]]:
    """The `names` that `adapt` gets."""
    categories = [column for column in data.columns if column.kind == "category"]
    found = {column.name: VALUES[place] for place, column in enumerate(categories)}
    return found | ({data.target: data.classes} if data.classes else {})


def batch(data: DataSchema, raw: dict[str, list[Any]]) -> tuple[Any, torch.Tensor]:
    """Raw rows as a rank gives them to the model: inputs and targets."""
    names = vocabularies(data)
    nan = float("nan")
    numbers = [
        torch.tensor([nan if value is None else value for value in raw[column.name]])
        for column in data.columns
        if column.kind == "number"
    ]
    codes = [
        torch.tensor(
            [
                names[column.name].index(value) + 1 if value in names[column.name] else 0
                for value in raw[column.name]
            ]
        )
        for column in data.columns
        if column.kind == "category"
    ]
    targets = raw[data.target]
    classes = data.classes
    wanted = torch.tensor([classes.index(one) for one in targets] if classes else targets)
    inputs = {
        name: torch.stack(parts, 1)
        for name, parts in (("numbers", numbers), ("categories", codes))
        if parts
    }
    return next(iter(inputs.values())) if len(inputs) == 1 else inputs, wanted
