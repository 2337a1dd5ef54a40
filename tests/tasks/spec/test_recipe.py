"""A recipe fills in the training fields that the user did not set, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.spec.job import load_job
from trainwright.tasks.spec.recipe import given_fields, with_recipe

RECIPE = {
    "train.optimizer": {"name": "adam", "betas": [0.9, 0.95], "weight_decay": 0.02},
    "train.learning_rate": 0.04,
    "train.schedule": "flat-cosine",
    "train.warm_up": 0.1,
    "train.epochs": 64,
    "train.global_batch_size": 256,
}
DATA = {"uri": "builtin:digits"}
trainings = st.fixed_dictionaries(
    {},
    optional={
        "epochs": st.integers(1, 9),
        "global_batch_size": st.integers(1, 99),
        "learning_rate": st.floats(0.1, 1),
        "schedule": st.sampled_from(["cosine", "constant"]),
        "clip_norm": st.floats(0.1, 1),
        "seed": st.integers(0, 9),
        "optimizer": st.fixed_dictionaries(
            {}, optional={"name": st.just("adam"), "weight_decay": st.floats(0.1, 1)}
        ),
    },
)


def filled(train: dict[str, Any], recipe: dict[str, Any] = RECIPE) -> dict[str, Any]:
    job = load_job({"name": "a", "data": DATA, "train": train})
    found: dict[str, Any] = with_recipe(job, recipe, given_fields(job)).train.model_dump()
    return found


@given(trainings)
def test_the_users_fields_win_and_the_recipe_fills_the_rest(train: dict[str, Any]) -> None:
    found = filled(train)
    for field, value in train.items():
        if field == "optimizer":
            assert {name: found[field][name] for name in value} == value
        else:
            assert found[field] == value
    untouched = {"epochs", "global_batch_size", "learning_rate", "schedule"} - set(train)
    assert {name: found[name] for name in untouched} == {
        name: RECIPE[f"train.{name}"] for name in untouched
    }
    assert found["optimizer"]["betas"] == (0.9, 0.95)
    assert found["warm_up"] == 0.1


def test_a_field_that_is_set_to_its_default_is_set() -> None:
    assert filled({"epochs": 5})["epochs"] == 5
    assert filled({"learning_rate": "auto"})["learning_rate"] == "auto"


def test_with_another_optimizer_the_recipes_rate_and_constants_are_not_taken() -> None:
    found = filled({"optimizer": {"name": "sgd"}})
    assert found["optimizer"]["name"] == "sgd"
    assert found["optimizer"]["weight_decay"] == 0
    assert found["learning_rate"] == "auto"
    assert found["epochs"] == 64


@pytest.mark.parametrize(
    ("train", "batch"),
    [
        ({"batch_bounds": [8, 64]}, 64),
        ({"batch_bounds": [512, 1024]}, 512),
        ({"adaptive_batch": True, "batch_bounds": [8, 128]}, 128),
        ({}, 256),
    ],
)
def test_a_recipes_batch_stays_within_the_jobs_bounds(train: dict[str, Any], batch: int) -> None:
    assert filled(train)["global_batch_size"] == batch


def test_a_recipe_has_fields_of_the_training_only() -> None:
    with pytest.raises(ValueError, match=r"objective\.deadline: not one of train\."):
        filled({}, {"objective.deadline": 3})
