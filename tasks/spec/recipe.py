"""A model's training recipe: the fields of a job that it fills in unless the user set them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.train_spec import TrainSpec

AnyJob = TypeVar("AnyJob", bound=Job)
Recipe = Mapping[str, Any]
"""Values of fields of `train` by dotted name, such as `train.epochs`."""

_OPTIMIZER, _RATE, _BATCH = "train.optimizer", "train.learning_rate", "train.global_batch_size"
RECIPE_FIELDS = (
    "train.clip_norm",
    "train.early_stopping",
    "train.epochs",
    _BATCH,
    "train.label_smoothing",
    _RATE,
    _OPTIMIZER,
    "train.schedule",
    "train.warm_up",
)
"""The fields that a recipe may have."""


def given_fields(document: BaseModel, path: str = "") -> list[str]:
    """The dotted names of the fields that were set when the document was made, sorted."""
    return sorted(_given(document, path))


def _given(document: BaseModel, path: str) -> Iterator[str]:
    for name in document.model_fields_set:
        value = getattr(document, name)
        if isinstance(value, BaseModel):
            yield from _given(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def is_recipe_field(name: str) -> bool:
    """Whether a recipe may fill in the field with this dotted name."""
    return any(name == one or name.startswith(f"{one}.") for one in RECIPE_FIELDS)


def with_recipe(job: AnyJob, recipe: Recipe, given: Collection[str]) -> AnyJob:
    """The job with the recipe's values in the fields that are not among `given`.

    A learning rate belongs to its optimizer, so if the job chooses another optimizer, neither is
    taken. A batch is brought within the job's own `batch_bounds`. Raises ValueError for a
    recipe with other fields.
    """
    train = job.train.model_dump(mode="json")
    left = dict(_leaves(recipe))
    own = {*given}
    if f"{_OPTIMIZER}.name" in own and left.get(f"{_OPTIMIZER}.name") != job.train.optimizer.name:
        own |= {name for name in left if name == _RATE or name.startswith(f"{_OPTIMIZER}.")}
    if (job.train.adaptive_batch or "train.batch_bounds" in own) and _BATCH in left:
        low, high = job.train.batch_bounds
        left[_BATCH] = min(max(left[_BATCH], low), high)
    for name, value in left.items():
        if any(f"{one}.".startswith(f"{name}.") or name.startswith(f"{one}.") for one in own):
            continue
        *above, last = name.split(".")[1:]
        place = train
        for part in above:
            place[part] = place.get(part) or {}
            place = place[part]
        place[last] = value
    made = validated(TrainSpec, train, "recipe")
    return job.model_copy(update={"train": made})


def used_recipe(recipe: Recipe, train: TrainSpec) -> dict[str, Any]:
    """The part of a recipe whose values a job has, not its own."""
    values = {"train": train.model_dump(mode="json")}

    def used(value: Any, path: Sequence[str]) -> Any:
        found: Any = values
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if not isinstance(value, Mapping):
            return value if found == value else None
        inner = {key: used(one, [*path, key]) for key, one in value.items()}
        return {key: one for key, one in inner.items() if one is not None} or None

    parts = {name: used(value, name.split(".")) for name, value in recipe.items()}
    return {name: value for name, value in parts.items() if value is not None}


def _leaves(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    for name, value in recipe.items():
        if not is_recipe_field(name):
            raise ValueError(f"recipe: {name}: not one of {', '.join(RECIPE_FIELDS)}")
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value
