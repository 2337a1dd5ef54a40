"""The form and the job file are equivalent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.form import Form
from trainwright.tasks.spec.job import Job, load_job

DIGITS = Path(__file__).parents[3] / "dags" / "jobs" / "digits.yaml"
seconds = st.integers(1, 10**6).map(lambda value: f"{value}s")
names = st.text("abcdefghij0123456789-", min_size=1, max_size=20).map(lambda text: f"a{text}b")
jobs = st.fixed_dictionaries(
    {
        "name": names,
        "data": st.fixed_dictionaries(
            {"uri": st.just("builtin:digits")}, optional={"target": names}
        ),
    },
    optional={
        "priority": st.integers(-100, 100),
        "queue_timeout": seconds,
        "model": st.fixed_dictionaries(
            {"source": st.just("m.py")}, optional={"config": st.just({"width": 3, "x": [1, "a"]})}
        ),
        "train": st.fixed_dictionaries(
            {},
            optional={
                "epochs": st.integers(1, 100),
                "global_batch_size": st.one_of(st.just("auto"), st.integers(1, 10**6)),
                "learning_rate": st.one_of(st.just("auto"), st.floats(1e-6, 10.0)),
                "adaptive_split": st.booleans(),
                "target": st.fixed_dictionaries({"value": st.floats(0, 1, exclude_min=True)}),
                "optimizer": st.fixed_dictionaries({"name": st.sampled_from(["sgd", "adam"])}),
            },
        ),
        "objective": st.fixed_dictionaries({"deadline": seconds}),
        "devices": st.fixed_dictionaries({"types": st.just(["cpu"])}),
        "promotion": st.fixed_dictionaries(
            {}, optional={"alias": names, "require_approval": st.booleans()}
        ),
    },
)


def filled(job: Job, form: Form) -> dict[str, Any]:
    """The form's fields, filled in with a job's values."""
    document = job.model_dump(mode="json")
    values: dict[str, Any] = {}
    for one in form.fields:
        place: Any = document
        for key in one.name.split("."):
            place = place.get(key) if isinstance(place, dict) else None
        values[one.name] = place
    return values


@given(jobs)
def test_a_form_filled_in_with_a_jobs_values_gives_that_job(values: dict[str, Any]) -> None:
    job = validated(Job, values, "job")
    assert validated(Job, Form().job(filled(job, Form())), "form") == job


def test_a_form_shows_name_uri_and_target_of_an_example_and_is_empty_otherwise() -> None:
    form = Form(load_job(DIGITS))
    shown = {one.name: one.default for one in form.fields if not isinstance(one.default, bool)}
    assert {name for name, value in shown.items() if value is not None} == {
        "name",
        "data.uri",
        "data.target",
    }
    for one in form.fields:
        jsonschema.validate(one.default, one.schema)
    fields = {one.name: one for one in form.fields}
    assert fields["train.epochs"].description.endswith("; default: 5")
    assert fields["queue_timeout"].description.endswith("; default: 3600s")
    assert "default: auto" in fields["train.layout"].description
    data = {"uri": "builtin:digits", "target": "label"}
    assert form.job({}) == {"name": "digits", "data": data}


def test_every_field_of_the_job_is_in_the_form_with_its_help_and_section() -> None:
    fields = {one.name: one for one in Form().fields}
    assert {
        "name",
        "data.uri",
        "train.optimizer.name",
        "objective.deadline",
        "promotion.require_approval",
    } <= set(fields)
    assert not [name for name in fields if name.startswith("schedule")]
    assert all(one.description for one in fields.values())
    assert fields["train.optimizer.name"].schema["section"] == "Train: optimizer"
    assert fields["objective.minimize"].schema["enum"][:3] == ["energy", "cost", "time"]


@pytest.mark.parametrize(("given", "means"), [("auto", "auto"), ("96", 96), (" 96 ", 96), (96, 96)])
def test_a_field_for_a_number_or_auto_accepts_text(given: object, means: object) -> None:
    values = {"name": "a", "data.uri": "builtin:digits", "model.source": "m.py"}
    values |= {"train.global_batch_size": given}
    assert Form().job(values)["train"]["global_batch_size"] == means


@pytest.mark.parametrize(
    ("given", "means"),
    [("late-multiply", "late-multiply"), ("{dense: factors}", {"dense": "factors"}), ("", None)],
)
def test_a_layout_is_a_word_or_a_mapping_as_text(given: str, means: object) -> None:
    values = {"name": "a", "data.uri": "builtin:digits", "model.source": "m.py"}
    assert Form().job(values | {"train.layout": given}).get("train", {}).get("layout") == means


def test_fields_that_were_left_are_not_set_so_that_a_recommended_recipe_fills_them_in() -> None:
    values = {"name": "a", "data.uri": "builtin:digits"}
    untouched = {one.name: one.default for one in Form().fields}
    assert Form().job(untouched | values) == {"name": "a", "data": {"uri": "builtin:digits"}}
    given = Form().job(untouched | values | {"train.epochs": 5, "train.adaptive_split": False})
    assert given["train"] == {"epochs": 5, "adaptive_split": False}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "form: name: required field is missing"),
        ({"name": "<script>"}, "form: name: got '<script>'"),
        ({"name": "../../x"}, r"form: name: got '../../x'"),
        (
            {"name": "a", "objective.deadline": "30"},
            "form: objective.deadline: got '30'; allowed: a number with its unit",
        ),
        ({"name": "a", "train.learning_rate": "fast"}, "form: train.learning_rate"),
        ({"name": "a", "train.layout": "fast"}, "form: train.layout: got 'fast'; allowed: a map"),
        ({"name": "a", "train.layout": "{dense: x}"}, "form: train.layout.dense: got 'x'; allo"),
        ({"name": "a", "train.layout": "{dense"}, "form: train.layout: not valid YAML or JSON"),
        (
            {"name": "a", "train.target.value": 97},
            "form: train.target.value: got 97; allowed: a share",
        ),
        (
            {"name": "a", "train.target.metric": "loss"},
            "form: train.target.value: required field is missing",
        ),
    ],
)
def test_an_error_in_a_form_names_its_field(values: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Form().job({"data.uri": "builtin:digits", **values})


def test_a_form_accepts_a_job_file_but_not_both() -> None:
    form = Form(load_job(DIGITS))
    untouched = {one.name: one.default for one in form.fields}
    assert form.job_text({**untouched, "job": "/jobs/x.yaml"}) == "/jobs/x.yaml"
    with pytest.raises(
        BadInput,
        match=r"got '/jobs/x.yaml' and train.epochs; pass either a job file or the form's fields",
    ):
        form.job_text({**untouched, "job": "/jobs/x.yaml", "train.epochs": 1})
