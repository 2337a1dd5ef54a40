"""Hooks of MkDocs: the generated pages, links into the tree, formulas as MathML."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import reference

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the reference, which are made from the code."""
    for path, content in reference.pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Set formulas as MathML, which browsers show without a script."""
    return _FORMULA.sub(_formula, content)


def _formula(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return convert(html.unescape(found[2]), display=display)
