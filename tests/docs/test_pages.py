"""The documentation's links, commands, settings and examples match the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
import yaml
from doc_pages import DOCS, PAGES, README, ROOT, blocks, code, page_id
from typer.main import get_command

from trainwright.tasks import errors, settings
from trainwright.tasks.cli.main import app
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]  # a group
_VARIABLE = re.compile(r"\bTRAINWRIGHT_[A-Z0-9_]+")
pages = pytest.mark.parametrize("page", PAGES, ids=page_id)


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
        text = _text(target)
        if text is None or (anchor and anchor not in _anchors(text)):
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


@pages
def test_every_variable_in_the_documentation_is_a_setting(page: Path) -> None:
    known = set(_VARIABLE.findall(settings.__doc__ or ""))
    assert set(_VARIABLE.findall(page.read_text())) <= known


@pages
def test_every_job_and_pool_in_the_documentation_is_valid(page: Path) -> None:
    for text in blocks(page.read_text(), "yaml"):
        values = yaml.safe_load(text)
        validated(Pool if "hosts" in values else Job, values, page.name)


def test_the_manual_lists_the_exit_codes() -> None:
    page = _generated()["reference/exit-codes.md"]
    listed = set(map(int, re.findall(r"^\| (\d+) \|", page, re.MULTILINE)))
    kinds = (one for one in vars(errors).values() if isinstance(one, type))
    raised = {one.exit_code for one in kinds if issubclass(one, errors.TrainwrightError)}
    assert listed == {0, *raised}


@cache
def _generated() -> dict[str, str]:
    """The pages of the reference, which are made while the site is built."""
    return reference.pages()


def _text(target: Path) -> str | None:
    """The text of a file or of a generated page; None: there is neither."""
    if target.exists():
        return target.read_text() if target.suffix == ".md" else ""
    name = target.relative_to(DOCS).as_posix() if target.is_relative_to(DOCS) else ""
    return _generated().get(name)


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}
