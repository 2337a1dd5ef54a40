"""The example of a step in architecture.md takes its place in the chain and does its work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import doors
import pytest
from doc_pages import ARCHITECTURE, example
from finished_run import begin_run
from packages import install

from trainwright.operators.base import StepOperator, operator_of
from trainwright.tasks import chain
from trainwright.tasks.context import RunContext


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example, installed as a package."""
    modules = {
        "line_count": example(ARCHITECTURE, "a step"),
        "line_count_operator": example(ARCHITECTURE, "its operator"),
    }
    points = {"count_lines": "line_count:STEP"}
    install(tmp_path / "acme", modules, chain.ENTRY_POINTS, points)
    monkeypatch.syspath_prepend(tmp_path / "acme")
    chain.steps.cache_clear()
    yield
    for name in modules:
        sys.modules.pop(name, None)
    chain.steps.cache_clear()


@pytest.mark.usefixtures("registered")
def test_the_example_step_is_in_the_chain_and_writes_its_artefact(tmp_path: Path) -> None:
    step = chain.step("count_lines")
    names = [one.name for one in chain.steps()]
    assert names.index("count_lines") == names.index("extract") + 1
    assert issubclass(operator_of(step), StepOperator)
    assert operator_of(step).step == step.name

    run = begin_run((tmp_path / "store").as_uri(), "counted", 1)
    reference = step.do(RunContext.attach(doors.run_at(run.uri)))
    assert run.has(step.artefact)
    lines = sum(len(text.splitlines()) for text in run.model().files.values())
    assert step.summary(reference) == f"{lines} lines of code"
