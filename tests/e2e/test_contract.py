"""Options, JSON fields, exit codes and kinds of errors at the command line stay as recorded.

Options, fields and columns may be added, but none may vanish or change its type. Exit codes and
kinds of errors must be equal. `contract.py` has the examples and records anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from contract import (
    ARTEFACTS,
    ASKED,
    COMMANDS,
    EXAMPLES,
    FILE,
    REFUSALS,
    SEALED,
    SLOW_REFUSALS,
    WITH_AIRFLOW,
    Examples,
    artefact_fields,
    fields,
    options,
    refused,
    tables,
    vanished,
)
from golden import prepared
from outside import folder_of, read

RECORDED: dict[str, dict[str, Any]] = read(FILE)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examples]:
    """One home and store for all of the file; what the examples started is stopped."""
    examples = Examples(prepared(tmp_path_factory.mktemp("contract") / "place"))
    yield examples
    examples.place.run("down")


def named(names: Iterable[str]) -> list[Any]:
    """Test parameters; those that need an Airflow, or a training more, are slow."""
    slow = {*WITH_AIRFLOW, *SLOW_REFUSALS}
    return [pytest.param(one, marks=[pytest.mark.slow] * (one in slow)) for one in names]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_that_it_had(here: Examples, command: str) -> None:
    assert set(RECORDED["options"][command]) - set(options(here.place, command)) == set()


@pytest.mark.parametrize("name", named(EXAMPLES))
def test_a_document_has_the_fields_that_it_had(here: Examples, name: str) -> None:
    assert vanished(RECORDED["fields"][name], fields(here(name))) == []


@pytest.mark.parametrize("artefact", ARTEFACTS)
def test_an_artefact_has_the_fields_that_it_had(here: Examples, artefact: str) -> None:
    now = artefact_fields(here.run_folder(), [artefact])[artefact]
    assert vanished(RECORDED["artefacts"][artefact], now) == []


@pytest.mark.slow
@pytest.mark.parametrize("artefact", SEALED)
def test_a_sealed_artefact_has_the_fields_that_it_had(here: Examples, artefact: str) -> None:
    now = artefact_fields(folder_of(here("run")["run"]), [artefact])[artefact]
    assert vanished(RECORDED["artefacts"][artefact], now) == []


def test_what_a_run_measured_has_the_columns_that_it_had(here: Examples) -> None:
    now = tables(here.run_folder())
    assert {kind: vanished(before, now[kind]) for kind, before in RECORDED["tables"].items()} == {
        kind: [] for kind in now
    }


@pytest.mark.parametrize("name", named([*REFUSALS, *ASKED]))
def test_bad_input_is_refused_as_it_was(here: Examples, name: str) -> None:
    before, now = RECORDED["refusals"][name], refused(here, name)
    same = ("code", "kind", "state")
    assert {one: now[one] for one in same} == {one: before[one] for one in same}
    assert vanished(before["fields"], now["fields"]) == []


def test_the_service_has_the_routes_that_it_had(here: Examples) -> None:
    here("serve")
    now = here.routes
    assert [
        path for path, had in RECORDED["routes"].items() if set(had) - set(now.get(path, []))
    ] == []


def test_a_field_that_vanishes_or_changes_is_seen() -> None:
    before = fields(
        {"a": 1, "b": [{"c": "x"}, {"c": None, "d": True}], "operations": {"aten.add": 3}}
    )
    assert before == {
        "a": ["number"],
        "b": ["list"],
        "b[]": ["object"],
        "b[].c": ["null", "string"],
        "b[].d": ["boolean"],
        "operations": ["object"],
        "operations.*": ["number"],
    }
    more = {"a": 1.5, "b": [{"c": "y", "d": False, "e": 1}], "operations": {"x": 1}, "f": 0}
    assert vanished(before, fields(more)) == []
    less = {"a": "1", "b": [{"c": None}], "operations": {}}
    assert vanished(before, fields(less)) == [
        "a: was number, is string",
        "b[].d: vanished",
        "operations.*: vanished",
    ]
