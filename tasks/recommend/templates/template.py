"""What a template is: a family of models in several sizes, and how to train them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.tasks.recommend.source_code import Header
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.spec.data_spec import Task
from trainwright.tasks.spec.job import Scalar

ModelConfig = Mapping[str, Scalar]
"""Arguments of `build_model`, with the values that become their defaults in the source."""


@dataclass(frozen=True)
class Template:
    """A family of models for some tasks.

    `source(schema, config, header)` is the text of a model's source, the same for the same
    arguments; it raises BadInput if the data has no such model. `recipe(schema, config)` has fields
    of the job by dotted name, such as `train.epochs`.
    """

    name: str
    tasks: tuple[Task, ...]
    sizes: Mapping[str, ModelConfig]
    """the configurations `small`, `medium` and `large`"""
    source: Callable[[DataSchema, ModelConfig, Header], str]
    recipe: Callable[[DataSchema, ModelConfig], dict[str, Any]]
