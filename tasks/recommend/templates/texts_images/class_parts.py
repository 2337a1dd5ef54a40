"""What the sources of all classifiers with one input have in common: of texts, and of images.

The names of the classes are a buffer of the model, which `adapt` sets. A model's `encode` makes its
input from raw values.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.tasks.errors import BadInput
from trainwright.tasks.recommend.source_code import (
    Header,
    class_bytes,
    finished,
    shown,
    text_assignment,
)
from trainwright.tasks.recommend.templates.template import ModelConfig
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.spec.data_spec import Task


def single_input(schema: DataSchema, task: Task, dimensions: int) -> tuple[int, ...]:
    """The shape of the data's only input. Raises BadInput if the data is not of this form."""
    shape = schema.inputs.get("inputs", ())
    if schema.task != task or len(shape) != dimensions or not schema.classes:
        found = ", ".join(f"{name} {list(one)}" for name, one in schema.inputs.items())
        raise BadInput(
            f"data: got {schema.task} with {found or 'no inputs'}; allowed for a model for {task}: "
            f"that task, with one input of {dimensions} dimension{'s' if dimensions > 1 else ''}"
        )
    return shape


def classifier_source(
    schema: DataSchema,
    kind: str,
    code: str,
    header: Header,
    *,
    words: bool,
    values: Mapping[str, str],
) -> str:
    """The source of a classifier. `kind`: words for its first line, such as `Bag of words`.

    `code` is as in `source_code.finished`: constants, and `class Model` with the buffer
    `class_names`, the method `encode(values)`, which makes an input from raw values, and
    `start(inputs, targets)`, which sets the initial state from training rows; `build_model`; and
    `random_inputs(batch_size)`. `values` must have `column`, the assignment of COLUMN, `raw`, words
    for what they are, and `sample`, code for one of them. `words`: whether the input is text.
    """
    classes = schema.classes or []
    shared = {
        "target": text_assignment("TARGET", schema.target),
        "classes": str(len(classes)),
        "class_bytes": str(class_bytes(classes)),
    }
    title = f"{kind}: {shown(schema.target, 40)}. Edit it as you like."
    return finished(
        f"{_START}\n{code.strip()}\n\n\n{_END.strip()}",
        {"words": words},
        {**shared, **values},
        title,
        header,
    )


def for_rows(rows: int, few: int, many: int) -> int:
    """A number for few rows of data (20,000 or less), or for many; between them by doubling."""
    value, limit = few, 20_000
    while value < many and rows > limit:
        value, limit = 2 * value, 4 * limit
    return min(value, many)


def whole_number(config: ModelConfig, name: str) -> int:
    """A whole number of a template's configuration."""
    value = config[name]
    assert isinstance(value, int)
    return value


_START = r"""
from __future__ import annotations

import json
#? words
import re
#?
import sys
#? words
import zlib
#?
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# The column of raw values that `predict` takes
$column
$target
CLASSES, CLASS_BYTES = $classes, $class_bytes
"""

_END = r'''
def loss(outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The mean over the batch. Only training smooths labels, by the job's `label_smoothing`."""
    return functional.cross_entropy(outputs, targets, label_smoothing=label_smoothing)


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Random inputs and targets."""
    return random_inputs(batch_size), torch.randint(CLASSES, (batch_size,))


def adapt(model: Model, inputs: Tensor, targets: Tensor, names: dict[str, list[str]]) -> None:
    """Set statistics, class names and initial weights from rows of the training part."""
    text = json.dumps(names[TARGET]) if TARGET in names else ""
    if len(text) > CLASS_BYTES:
        raise ValueError(f"{TARGET!r} has other classes than those that this file is for")
    model.class_names[: len(text)] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    model.start(inputs, targets)


def predict(model: Model, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The class of each raw row, and its probability; COLUMN has $raw."""
    training = model.training
    model.eval()
    values, parts = rows[COLUMN], [torch.zeros(0, CLASSES)]
    with torch.no_grad():
        for start in range(0, len(values), 256):
            parts.append(model(model.encode(values[start : start + 256])).float().cpu())
    model.train(training)
    text = bytes(model.class_names.tolist()).strip()
    names = json.loads(text) if text else list(range(CLASSES))
    probability, best = torch.cat(parts).softmax(1).max(1)
    return {
        "prediction": [names[one] for one in best.tolist()],
        "probability": probability.tolist(),
    }


if __name__ == "__main__":
    model = build_model()
    inputs, targets = example_batch(256)
    with torch.no_grad():
        adapt(model, inputs, targets, {})
    parameters = sum(one.numel() for one in model.parameters())
    sys.stdout.write(f"{model}\n{parameters:,} parameters\n")
    sample: list[Any] = [$sample]
    sys.stdout.write(f"{predict(model, {COLUMN: sample})}\n")
'''
