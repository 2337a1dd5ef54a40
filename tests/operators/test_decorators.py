"""TaskFlow functions that pass input to the operators, and refused values.

tests/e2e/test_foreign_dags.py runs complete DAGs of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from trainwright.operators import decorators
from trainwright.operators.decorators import estimate_task, train_task, validate_task
from trainwright.operators.provider import get_provider_info
from trainwright.tasks.chain import steps

CONTEXT: Any = {"dag_run": SimpleNamespace(dag_id="d", run_id="r"), "run_id": "r"}


def operator(decorated: Any, *args: object, **kwargs: object) -> Any:
    return decorated(*args, **kwargs).operator


def test_the_providers_decorators_exist() -> None:
    named = {one["name"]: one["class-name"] for one in get_provider_info()["task-decorators"]}
    assert set(named) == {f"trainwright_{step.name}" for step in steps()}
    for name, where in named.items():
        module, _, function = where.rpartition(".")
        made = getattr(importlib.import_module(module), function)(lambda: {})
        assert made.operator_class.custom_operator_name == f"@task.{name}"


def test_a_function_returns_the_data_to_check_and_gets_its_arguments_and_the_context(
    home: Path, tmp_path: Path
) -> None:
    table = tmp_path / "r.csv"
    table.write_text("a,label\n" + "".join(f"{n}.5,{n % 2}\n" for n in range(40)))

    def check(folder: str, run_id: str | None = None) -> dict[str, Any]:
        return {"uri": f"{folder}/{run_id}.csv"}

    task = operator(validate_task(check), str(tmp_path))
    answer = task.execute(dict(CONTEXT))
    assert (answer["success"], answer["rows"]) == (True, 40)
    assert task.data == {"uri": str(table)}


@pytest.mark.parametrize("returned", [None, 7, "", [], [{"name": "x"}], object()])
@pytest.mark.parametrize(
    ("decorator", "allowed"), [(train_task, "or a job file's path"), (validate_task, "a mapping")]
)
def test_a_return_value_that_is_not_a_job_fails_at_once_and_is_named(
    home: Path, decorator: Callable[..., Any], allowed: str, returned: object
) -> None:
    def mine() -> object:
        return returned

    with pytest.raises(
        AirflowFailException, match=rf"bad_input: mine: the function returned .*{allowed}"
    ):
        operator(decorator(mine)).execute(dict(CONTEXT))


def test_a_wrong_job_is_reported_with_its_field(home: Path) -> None:
    def mine() -> dict[str, Any]:
        return {"name": "Not A Name", "data": {"uri": "builtin:digits"}}

    with pytest.raises(AirflowFailException, match="name"):
        operator(train_task(mine)).execute(dict(CONTEXT))


def test_a_path_that_a_function_returns_is_a_job_file(home: Path, tmp_path: Path) -> None:
    def mine() -> Path:
        return tmp_path / "none.yaml"

    with pytest.raises(AirflowFailException, match=r"none\.yaml"):
        operator(train_task(mine)).execute(dict(CONTEXT))


def test_a_template_in_a_returned_value_is_not_rendered(home: Path) -> None:
    def mine(text: str) -> dict[str, Any]:
        return {"uri": text}

    task = operator(validate_task(mine), "/no/{{ run_id }}.csv")
    with pytest.raises(AirflowFailException, match=r"\{\{ run_id \}\}"):
        task.execute(dict(CONTEXT))


def test_a_functions_own_errors_are_raised_unchanged(home: Path) -> None:
    def skips() -> dict[str, Any]:
        raise AirflowSkipException("nothing to do today")

    with pytest.raises(AirflowSkipException):
        operator(train_task(skips)).execute(dict(CONTEXT))


@pytest.mark.parametrize(
    ("decorator", "names"),
    [
        (train_task, ("job", "run")),
        (estimate_task, ("job", "run")),
        (validate_task, ("data", "job", "run")),
    ],
)
def test_an_input_that_the_function_returns_can_not_be_passed_too(
    decorator: Any, names: tuple[str, ...]
) -> None:
    for name in names:
        with pytest.raises(TypeError, match=rf"got {name}=; leave it out: the function returns"):
            decorator(**{name: {}})


def test_a_return_annotation_does_not_split_the_job_into_xcoms() -> None:
    def mine() -> dict[str, Any]:
        return {}

    assert not operator(train_task(mine)).multiple_outputs
    assert operator(train_task(mine, multiple_outputs=True)).multiple_outputs


def test_a_function_that_is_no_steps_decorator_is_missing() -> None:
    with pytest.raises(AttributeError, match="no attribute 'dance_task'"):
        decorators.dance_task  # noqa: B018 - the access is the test
