"""The generated reference is complete: whatever it lists has a meaning. The site builds."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import reference
from doc_pages import ROOT

from trainwright import operators
from trainwright.tasks import settings


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


@pytest.mark.parametrize(
    "name",
    [
        "job",
        "pool",
        "artefacts",
        "airflow",
        "commands",
        "rest",
        "settings",
        "exit-codes",
    ],
)
def test_every_row_of_the_reference_has_a_meaning(pages: dict[str, str], name: str) -> None:
    rows = re.findall(r"^\| (?!---)(.+) \|$", pages[f"reference/{name}.md"], re.MULTILINE)
    assert rows
    assert [row for row in rows if re.search(r"\|\s*$", row)] == []


def test_every_operator_says_what_it_takes_and_returns_and_how_it_fails() -> None:
    texts = {name: inspect.getdoc(getattr(operators, name)) or "" for name in operators.__all__}
    for name, text in texts.items():
        assert "| input |" in text, name
        assert "Returns" in text, name
        assert "| failure |" in text, name


def test_every_route_says_what_it_does(pages: dict[str, str]) -> None:
    routes = pages["reference/rest.md"].split("\n## ")[1:]
    assert [one for one in routes if not one.split("\n")[2].strip()] == []


def test_every_variable_that_the_settings_read_is_in_the_reference(pages: dict[str, str]) -> None:
    page = pages["reference/settings.md"]
    read = set(re.findall(r'_get\("([A-Z0-9_]+)"', Path(settings.__file__).read_text()))
    assert read
    assert {f"TRAINWRIGHT_{name}" for name in read if f"TRAINWRIGHT_{name}`" not in page} == set()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / ".mkdocs.yml")]
    done = subprocess.run(
        [*command, "-d", str(tmp_path)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    page = (tmp_path / "explanation" / "planner.html").read_text()
    assert "<math" in page
    loaded = re.findall(r'<(?:link|script|img)[^>]+(?:href|src)="(https?://[^"]+)"', page)
    assert loaded == []
