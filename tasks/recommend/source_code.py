"""What all generated model sources have in common: header, literals, and how a file is written.

A generated source is formatted as `ruff format` would at 100 columns, and the same for the same
arguments. Names of columns are the only foreign text in its code, as literals that can't end early;
the header shows foreign text with all but plain characters replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template as Placeholders

from trainwright.tasks.errors import BadInput

WIDTH = 100
MOST_LINES = 200
FILE = "model.py"
"""The name of a generated file in its folder."""
_WRAPPED_LINES = 12
"""A list of names with more lines of text is written as one long line."""
_HEADER_COLUMNS = 300
_PLAIN = re.compile(
    r"[\u00c0-\u024f\u0391-\u03a1\u03a3-\u03ce\u0400-\u0481\u048a-\u052f"
    r"\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]"
)
"""Letters that literals and headers show as they are, besides printable ASCII."""
_DIGEST = re.compile(r"^Digest: ([0-9a-f]{64})\.", re.MULTILINE)


@dataclass(frozen=True)
class Header:
    """What a generated file says of its origin: one sentence or line for each field."""

    data: str
    """rows and columns of the data, and the SHA-256 of its content"""
    why: str
    """why this model"""
    command: str
    """the command that made the file"""


def finished(
    code: str, facts: Mapping[str, bool], values: Mapping[str, str], title: str, header: Header
) -> str:
    """The source of a file: `code` of a template after a header with `title` as its first line.

    Lines between `#? name` and `#?` stay only if that fact is true, lines after `#? !name` only if
    it is false; several must all hold. `$name` stands for a value; values are not searched for
    further ones.
    """
    body = Placeholders(_chosen(code.strip("\n"), facts)).substitute(values)
    said = [f"Data: {header.data}", f"Why: {header.why}", f"Made by: {header.command}"]
    wrapped = [line for text in said for line in _wrapped(text)]
    top = '"""' + "\n".join([shown(title), "", *wrapped]) + "\n"
    bottom = f'"""\n\n{body}\n'
    digest = hashlib.sha256((top + bottom).encode()).hexdigest()
    return f"{top}Digest: {digest}. Once edited, it is kept.\n{bottom}"


def _chosen(code: str, facts: Mapping[str, bool]) -> str:
    lines, keep = [], True
    for line in code.split("\n"):
        if line.lstrip().startswith("#?"):
            conditions = line.lstrip().removeprefix("#?").split()
            keep = all(facts[one.lstrip("!")] is not one.startswith("!") for one in conditions)
        elif keep:
            lines.append(line)
    return "\n".join(lines)


def is_as_generated(text: str) -> bool:
    """Whether a text is a generated source that nobody has edited."""
    found = _DIGEST.search(text)
    if found is None:
        return False
    without = text[: found.start()] + text[text.index("\n", found.start()) + 1 :]
    return hashlib.sha256(without.encode()).hexdigest() == found[1]


def write_source(folder: Path, text: str) -> Path:
    """Write a generated source to a folder. Returns its path. Raises BadInput.

    Raises as `require_replaceable`, but a file with just this text may be there.
    """
    path = folder / FILE
    if _there(path) == text:
        return path
    require_replaceable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def require_replaceable(folder: Path) -> None:
    """Raise BadInput if the folder is none, or its model file was edited or is not generated."""
    path = folder / FILE
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: is not a folder; choose another one")
    if os.path.lexists(path) and not is_as_generated(_there(path)):
        raise BadInput(
            f"{path}: was edited, and edited files are never overwritten; name it in the job "
            "as model.source, move it away, or choose another folder"
        )


def _there(path: Path) -> str:
    """A file's text; empty if it is no readable text."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return ""


def texts_literal(name: str, values: Sequence[str], most_lines: int = _WRAPPED_LINES) -> str:
    """The assignment of a list of any texts to a name: one line, `most_lines`, or one long line.

    Texts with quotes, backslashes or unusual characters are written as JSON with escapes.
    """
    line = f"{name}: list[str] = [" + ", ".join(f'"{value}"' for value in values) + "]"
    if all(map(_is_plain, values)) and _columns(line) <= WIDTH:
        return line
    texts = [_json_text(value) for value in values]
    return _json_literal(f"{name}: list[str]", texts, "r'", "'", most_lines)


def numbers_literal(name: str, values: Sequence[int]) -> str:
    """The assignment of a list of whole numbers to a name, as `texts_literal`."""
    line = f"{name}: list[int] = {list(values)}"
    if _columns(line) <= WIDTH:
        return line
    return _json_literal(f"{name}: list[int]", list(map(str, values)), '"', '"')


def _json_literal(
    start: str, texts: Sequence[str], opened: str, closed: str, most_lines: int = _WRAPPED_LINES
) -> str:
    line = f"{start} = json.loads({opened}[{', '.join(texts)}]{closed})"
    if _columns(line) <= WIDTH:
        return line
    pieces = [*(f"{text}, " for text in texts[:-1]), f"{texts[-1]}]"]
    pieces[0] = f"[{pieces[0]}"
    most = WIDTH - len(f"    {opened}{closed}")
    lines = list(_filled(pieces, most))
    if len(lines) <= most_lines and all(_columns(one) <= most for one in lines):
        inner = "\n".join(f"    {opened}{one}{closed}" for one in lines)
    else:
        inner = f"    {opened}[{','.join(map(_unbroken, texts))}]{closed}"
    return f"{start} = json.loads(\n{inner}\n)"


def text_assignment(name: str, value: str) -> str:
    """The assignment of any text to a name, as `texts_literal`."""
    text = _json_text(value)
    for line in (
        f'{name} = "{value}"' if _is_plain(value) else "",
        f"{name}: str = json.loads(r'{text}')",
    ):
        if line and _columns(line) <= WIDTH:
            return line
    return f"{name}: str = json.loads(\n    r'{_unbroken(text)}'\n)"


def texts_assignment(texts: Mapping[str, str]) -> str:
    """The assignment of any texts, one to each name, as `texts_literal`."""
    names = ", ".join(texts)
    line = f"{names} = " + ", ".join(f'"{value}"' for value in texts.values())
    if all(map(_is_plain, texts.values())) and _columns(line) <= WIDTH:
        return line
    return _json_literal(names, [_json_text(value) for value in texts.values()], "r'", "'", 1)


def shown(text: str, most: int = _HEADER_COLUMNS) -> str:
    """A text for people in a docstring: one line of `most` columns, plain characters only."""
    words = " ".join(text.split())
    if _columns(words) > most:
        words = words[: most - 1]
        while _columns(words) >= most:
            words = words[:-1]
        words += "…"
    known = "…–—×·±≤≥→%€²³°"
    return "".join(one if one in known or _is_plain(one) else "?" for one in words)


def class_bytes(classes: Iterable[str]) -> int:
    """The size of the buffer that holds the names of the classes as JSON."""
    return len(json.dumps(list(classes)).encode())


def _wrapped(text: str) -> list[str]:
    line = shown(text)
    width = WIDTH if _columns(line) == len(line) else WIDTH // 2
    return textwrap.wrap(line, width, subsequent_indent="    ", break_on_hyphens=False)


def _unbroken(text: str) -> str:
    """JSON without spaces: ruff accepts a long line that has none."""
    return text.replace(" ", "\\u0020")


def _is_plain(value: str) -> bool:
    return '"' not in value and "\\" not in value and _escaped(value) == value


def _json_text(value: str) -> str:
    """JSON for one text that can stand in r'…': no apostrophe, no control character."""
    escapes = json.dumps(value, ensure_ascii=False).replace("'", "\\u0027")
    return _escaped(escapes)


def _escaped(value: str) -> str:
    """The text with JSON's escapes for all characters that are not plain."""
    return "".join(
        one if " " <= one <= "~" or _PLAIN.fullmatch(one) else json.dumps(one)[1:-1]
        for one in value
    )


def _columns(text: str) -> int:
    return len(text) + sum(unicodedata.east_asian_width(one) in "WF" for one in text)


def _filled(pieces: Iterable[str], width: int) -> Iterable[str]:
    """Pieces joined to lines of at most this width; a longer piece is a line of its own."""
    line = ""
    for piece in pieces:
        if line and _columns(line + piece) > width:
            yield line
            line = ""
        line += piece
    yield line
