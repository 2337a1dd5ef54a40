"""The pages of the documentation, and their parts, for tests that check or run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
ARCHITECTURE, BENCHMARKS = DOCS / "architecture.md", DOCS / "benchmarks.md"
LAYOUTS = DOCS / "how-to" / "layouts.md"
PAGES = (README, *sorted(DOCS.rglob("*.md")))


def page_id(page: Path) -> str:
    """A page's path in the tree."""
    return page.relative_to(ROOT).as_posix()


def section(page: Path, heading: str) -> str:
    """The text below a heading of the second level."""
    _, found, rest = page.read_text().partition(f"\n## {heading}\n")
    assert found, f"{page.name} has no section {heading!r}"
    return rest.partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def example(page: Path, name: str) -> str:
    """The code block after the comment `<!-- example: NAME -->`."""
    marker = re.escape(f"<!-- example: {name} -->")
    found = re.search(rf"{marker}\n```\w+\n(.*?)```", page.read_text(), re.DOTALL)
    assert found is not None, f"{page.name} has no example {name!r}"
    return found[1]


def code(text: str) -> list[str]:
    """Everything that is set as code: inline spans and blocks."""
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [*re.findall(r"`([^`]+)`", outside), *re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)]
