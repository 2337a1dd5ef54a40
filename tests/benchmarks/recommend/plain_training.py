"""Trains a generated source as a single rank does: the same optimizer, schedule and batches."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright.estimator.trace import source
from trainwright.estimator.trace.batch_loss import loss_function
from trainwright.estimator.trace.source import ADAPT_ROWS, ModelDefinition
from trainwright.tasks.recommend.source_code import Header, write_source
from trainwright.tasks.recommend.templates.template import Template
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema
from trainwright.tasks.spec.train_spec import TrainSpec
from trainwright.tasks.train.rank.optimizer import learning_rate_at, make_optimizer

Rows = torch.Tensor | dict[str, torch.Tensor]


def split(rows: int, seed: int, share: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers for training and for validation."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows))
    held = round(rows * share)
    return order[held:], order[:held]


def schema_of(
    task: Any,
    inputs: Rows,
    *,
    classes: int = 0,
    columns: tuple[Column, ...] = (),
) -> DataSchema:
    """The schema of training rows."""
    named = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    rows = len(next(iter(named.values())))
    return DataSchema(
        task=task,
        rows=rows,
        train_rows=rows,
        validation_rows=0,
        inputs={name: tuple(one.shape[1:]) for name, one in named.items()},
        input_dtypes={name: str(one.dtype).removeprefix("torch.") for name, one in named.items()},
        target="label",
        target_dtype="int64" if classes else "float32",
        classes=[str(one) for one in range(classes)] or None,
        sha256="",
        columns=list(columns),
    )


def take(inputs: Rows, rows: Any) -> Rows:
    """Some rows of the inputs."""
    if isinstance(inputs, dict):
        return {name: one[rows] for name, one in inputs.items()}
    return inputs[rows]


def built(
    template: Template, size: str, schema: DataSchema, **options: Any
) -> tuple[ModelDefinition, dict[str, Any]]:
    """A template's generated source, loaded, and its recipe."""
    config = {**template.sizes[size], **options}
    with tempfile.TemporaryDirectory() as folder:
        text = template.source(schema, config, Header("benchmark", "benchmark", "benchmark"))
        definition = source.load(Path(folder), write_source(Path(folder), text).name)
    return definition, template.recipe(schema, config)


def trained(
    template: Template,
    size: str,
    schema: DataSchema,
    inputs: Rows,
    targets: torch.Tensor,
    seed: int,
    **options: Any,
) -> tuple[torch.nn.Module, ModelDefinition]:
    """The model of a template after the training that its recipe asks for, in evaluation mode.

    `options` replace values of the template's configuration.
    """
    definition, recipe = built(template, size, schema, **options)
    spec = TrainSpec.model_validate(
        {name.removeprefix("train."): value for name, value in recipe.items()}
    )
    assert isinstance(spec.global_batch_size, int)
    assert isinstance(spec.learning_rate, float)
    torch.manual_seed(seed)
    model = definition.build_model()
    loss = loss_function(definition, schema.task)
    adapt = definition.adapt
    if adapt is not None:
        some = torch.arange(len(targets))[:ADAPT_ROWS]
        with torch.no_grad():
            adapt(model, take(inputs, some), targets[some], {})
    optimizer = make_optimizer(model.parameters(), spec.optimizer, spec.learning_rate)
    order = torch.Generator().manual_seed(seed)
    done, whole = 0, spec.epochs * len(targets)
    model.train()
    for _ in range(spec.epochs):
        for rows in torch.randperm(len(targets), generator=order).split(spec.global_batch_size):
            rate = learning_rate_at(done, whole, spec.learning_rate, spec.schedule, spec.warm_up)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss(model(take(inputs, rows)), targets[rows]).backward()
            optimizer.step()
            done += len(rows)
    return model.eval(), definition


def outputs(model: torch.nn.Module, inputs: Rows) -> torch.Tensor:
    """The outputs for all rows."""
    count = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)
    with torch.no_grad():
        parts = [model(take(inputs, rows)) for rows in torch.arange(count).split(256)]
    return torch.cat(parts)


def accuracy(model: torch.nn.Module, inputs: Rows, targets: torch.Tensor) -> float:
    """The share of rows whose class is predicted."""
    return float((outputs(model, inputs).argmax(1) == targets).double().mean())
