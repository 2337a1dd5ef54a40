"""Options, JSON fields, exit codes and kinds of errors at the command line stay as recorded.

Options, fields and columns may be added, but none may vanish or change its type. Exit codes and
kinds of errors must be equal. `contract.py` has the examples and makes the recording.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from command_line import run
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
from outside import Ended, Outside, folder_of, read

RECORDED: dict[str, dict[str, Any]] = read(FILE)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examples]:
    """One home and store for all tests of this file. Stops the examples' processes."""
    examples = Examples(prepared(tmp_path_factory.mktemp("contract") / "place"))
    yield examples
    examples.place.run("down")


def named(names: Iterable[str]) -> list[Any]:
    """Test parameters; those that need an Airflow or another training are slow."""
    slow = {*WITH_AIRFLOW, *SLOW_REFUSALS}
    return [pytest.param(one, marks=[pytest.mark.slow] * (one in slow)) for one in names]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_keep_their_options(here: Examples, command: str) -> None:
    assert set(RECORDED["options"][command]) - set(options(here.place, command)) == set()


@pytest.mark.parametrize("name", named(EXAMPLES))
def test_documents_keep_their_fields(here: Examples, name: str) -> None:
    assert vanished(RECORDED["fields"][name], fields(here(name))) == []


@pytest.mark.parametrize("artefact", ARTEFACTS)
def test_artefacts_keep_their_fields(here: Examples, artefact: str) -> None:
    now = artefact_fields(here.run_folder(), [artefact])[artefact]
    assert vanished(RECORDED["artefacts"][artefact], now) == []


@pytest.mark.slow
@pytest.mark.parametrize("artefact", SEALED)
def test_sealed_artefacts_keep_their_fields(here: Examples, artefact: str) -> None:
    now = artefact_fields(folder_of(here("run")["run"]), [artefact])[artefact]
    assert vanished(RECORDED["artefacts"][artefact], now) == []


def test_recorded_rows_keep_their_columns(here: Examples) -> None:
    now = tables(here.run_folder())
    assert {kind: vanished(before, now[kind]) for kind, before in RECORDED["tables"].items()} == {
        kind: [] for kind in now
    }


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that start no Airflow run in the test's own process, which starts quickly.

    A separate process exits in the same way (`test_bad_input.py`).
    """
    apart = Outside.run

    def run_here(place: Outside, *args: str, **environment: str) -> Ended:
        if args[0] == "run":
            return apart(place, *args, **environment)
        own = place.environment(**environment)
        with pytest.MonkeyPatch.context() as patch:
            for name in {*os.environ} - {*own}:
                patch.delenv(name)
            patch.chdir(place.folder)
            done = run(*args, **{name: own[name] for name in own if own[name] != os.getenv(name)})
        return Ended(done.returncode, done.stdout, done.stderr)

    monkeypatch.setattr(Outside, "run", run_here)


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.parametrize("name", named([*REFUSALS, *ASKED]))
def test_bad_input_keeps_its_exit_code_and_kind(here: Examples, name: str) -> None:
    before, now = RECORDED["refusals"][name], refused(here, name)
    same = ("code", "kind", "state")
    assert {one: now[one] for one in same} == {one: before[one] for one in same}
    assert vanished(before["fields"], now["fields"]) == []


def test_the_service_keeps_its_routes(here: Examples) -> None:
    here("serve")
    now = here.routes
    assert [
        path for path, had in RECORDED["routes"].items() if set(had) - set(now.get(path, []))
    ] == []


def test_a_missing_or_changed_field_is_detected() -> None:
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
