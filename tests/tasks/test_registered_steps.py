"""Steps that packages register: their position in the chain, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packages import install

from trainwright.tasks import chain
from trainwright.tasks.errors import BadInput

SPECS = """
from trainwright.tasks.chain import StepSpec
from trainwright.tasks.runs.artefacts.report_figures import Report

def spec(name, after):
    return StepSpec(name, Report, "nowhere", "nowhere:Nothing", after=after)
"""
Install = Callable[..., None]


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package `mine` that registers these steps, each the value of an expression."""

    def put(**steps: str) -> None:
        names = "".join(f"{name} = {value}\n" for name, value in steps.items())
        points = {name: f"steps_of_mine:{name}" for name in steps}
        install(tmp_path / "mine", {"steps_of_mine": SPECS + names}, chain.ENTRY_POINTS, points)
        monkeypatch.syspath_prepend(tmp_path / "mine")
        chain.steps.cache_clear()

    yield put
    sys.modules.pop("steps_of_mine", None)
    chain.steps.cache_clear()


def names() -> list[str]:
    return [one.name for one in chain.steps()]


def test_a_registered_step_follows_its_predecessor_which_may_be_registered_too(
    registered: Install,
) -> None:
    before = names()
    registered(one="spec('one', 'two')", two="spec('two', 'estimate')")
    place = before.index("estimate") + 1
    assert names() == [*before[:place], "two", "one", *before[place:]]
    assert chain.step("one").after == "two"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            "spec('own', 'nothing')",
            "step own: after: got 'nothing'; allowed: validate, recommend, extract,",
        ),
        ("spec('own', None)", "step own: after: got None; allowed: validate, recommend, extract,"),
        ("spec('train', 'store')", "step train: registered twice; give each step its own name"),
        ("'own'", "step own of mine: got steps_of_mine:own, a str; allowed: a StepSpec"),
        ("1 / 0", "step own of mine: can't be loaded: ZeroDivisionError: division by zero"),
    ],
)
def test_an_invalid_registered_step_is_refused_by_name(
    registered: Install, value: str, says: str
) -> None:
    registered(own=value)
    with pytest.raises(BadInput) as refused:
        chain.steps()
    assert says in str(refused.value)


def test_an_unregistered_step_is_unknown() -> None:
    with pytest.raises(BadInput, match="step: got 'own'; allowed: validate, recommend, extract, "):
        chain.step("own")
