"""The models that a data set can have: every template for its task, in each of its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.estimator.near_names import meant
from trainwright.tasks.errors import BadInput
from trainwright.tasks.recommend.source_code import FILE, Header
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.recommend.templates.template import ModelConfig, Template
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.model import ModelSource

_MEDIUM_ROWS, _LARGE_ROWS = 2_000, 50_000
_DRAFT = Header(data="", why="", command="")


@dataclass(frozen=True)
class Proposal:
    """A template in one size, for one data set."""

    template: Template
    size: str
    schema: DataSchema
    prior: int
    """its place if no benchmark can tell: later templates first, in the size for this many rows"""

    @property
    def name(self) -> str:
        """Template and size, as in `linear-small`."""
        return f"{self.template.name}-{self.size}"

    @property
    def config(self) -> ModelConfig:
        """The size's arguments of `build_model`."""
        return self.template.sizes[self.size]

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The template's training recipe, with a batch of at most the training rows."""
        recipe = dict(self.template.recipe(self.schema, self.config))
        batch = recipe.get("train.global_batch_size")
        if isinstance(batch, int):
            recipe["train.global_batch_size"] = min(batch, self.schema.train_rows)
        return recipe

    def source(self, header: Header = _DRAFT) -> str:
        """The text of its source file. Raises BadInput if the data has no such model."""
        return self.template.source(self.schema, self.config, header)

    def model(self, header: Header = _DRAFT) -> ModelSource:
        """It as a run's model."""
        return ModelSource({FILE: self.source(header).encode()}, FILE, origin="recommended")


def proposals(schema: DataSchema, chosen: Sequence[str] = ()) -> list[Proposal]:
    """The proposals for a data set, each source once.

    `chosen`: names of templates, or of templates and a size as in `linear-small`; empty: all.
    Raises BadInput for an unknown template, or if there is none for the data.
    """
    known = templates()
    for name in chosen:
        if name not in {
            *known,
            *(f"{one.name}-{size}" for one in known.values() for size in one.sizes),
        }:
            raise BadInput(
                f"recommend.templates: got {name!r}; allowed: {', '.join(known)}, "
                f"also with a size, as in linear-small{meant(name, known)}"
            )
    fitting = [one for one in known.values() if schema.task in one.tasks]
    if not fitting:
        tasks = sorted({task for one in known.values() for task in one.tasks})
        raise BadInput(
            f"model: required field is missing; a {schema.task} task has no template "
            f"(those with one: {', '.join(tasks)})"
        )
    wanted = {
        one.name: [
            size
            for size in one.sizes
            if not chosen or one.name in chosen or f"{one.name}-{size}" in chosen
        ]
        for one in fitting
    }
    allowed = [one for one in fitting if wanted[one.name]]
    if not allowed:
        raise BadInput(
            f"recommend.templates: got {', '.join(chosen)}; "
            f"allowed for {schema.task}: {', '.join(one.name for one in fitting)}"
        )
    found: dict[str, Proposal] = {}
    kept: dict[str, Proposal] = {}
    why: BadInput | None = None
    for place, template in enumerate(reversed(allowed)):
        by_rows = _sizes_by_rows(schema.train_rows)
        for size in template.sizes:
            made = Proposal(template, size, schema, 10 * place + by_rows.index(size))
            try:
                source = made.source()
            except BadInput as error:
                why = why or error
                continue
            found.setdefault(source, made)  # sizes with one source have the first one's name
            if size in wanted[template.name]:
                kept[source] = found[source]
    if not kept and why is not None:
        raise why
    return list(kept.values())


def _sizes_by_rows(rows: int) -> tuple[str, str, str]:
    """The sizes, the one that suits this many training rows first."""
    if rows < _MEDIUM_ROWS:
        return "small", "medium", "large"
    return ("medium", "small", "large") if rows < _LARGE_ROWS else ("large", "medium", "small")
