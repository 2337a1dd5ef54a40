"""The documentation's links, commands, settings and examples match the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from doc_pages import GUIDE, PAGES, README, ROOT, blocks, code, section
from typer.main import get_command

from trainwright.tasks import errors, settings
from trainwright.tasks.cli.main import app
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]  # a group
_VARIABLE = re.compile(r"\bTRAINWRIGHT_[A-Z0-9_]+")
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_readme_and_changelog_stay_short() -> None:
    assert README.stat().st_size <= 8 * 1024
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(
        r"\]\(([^)]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    ):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


@pages
def test_every_command_and_its_options_exist(page: Path) -> None:
    used = [text for part in code(page.read_text()) for text in part.splitlines()]
    for line in used:
        found = re.search(r"(?:^|\$ |\$\()trainwright ((?:pool probe|[a-z-]+))(.*)", line)
        if found is None or found[1] == "WORD":
            continue
        assert found[1] in COMMANDS, line
        known = {name for one in COMMANDS[found[1]].params for name in one.opts}
        options = re.findall(r"(?<!\S)(--[a-z-]+)", found[2].partition("#")[0])
        assert set(options) - {"--help"} <= known, line


def test_the_guide_lists_every_command_and_every_setting() -> None:
    listed = section(GUIDE, "Commands")
    names = set(re.findall(r"`trainwright (pool probe|[a-z-]+)", listed))
    assert names == set(COMMANDS)
    known = set(_VARIABLE.findall(settings.__doc__ or ""))
    assert known <= set(_VARIABLE.findall(section(GUIDE, "Settings")))


@pages
def test_every_variable_in_the_documentation_is_a_setting(page: Path) -> None:
    known = set(_VARIABLE.findall(settings.__doc__ or ""))
    assert set(_VARIABLE.findall(page.read_text())) <= known


@pytest.mark.parametrize("page", [README, GUIDE], ids=lambda page: page.name)
def test_every_job_and_pool_in_the_documentation_is_valid(page: Path) -> None:
    examples = blocks(page.read_text(), "yaml")
    assert examples
    for text in examples:
        values = yaml.safe_load(text)
        validated(Pool if "hosts" in values else Job, values, page.name)


def test_the_readme_lists_the_exit_codes() -> None:
    listed = set(map(int, re.findall(r"^\| (\d+) \|", README.read_text(), re.MULTILINE)))
    kinds = (one for one in vars(errors).values() if isinstance(one, type))
    raised = {one.exit_code for one in kinds if issubclass(one, errors.TrainwrightError)}
    assert listed == {0, *raised}


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}
