"""What all generated sources have in common: literals, header, and that edits are kept."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.errors import BadInput
from trainwright.tasks.recommend.source_code import (
    Header,
    finished,
    is_as_generated,
    numbers_literal,
    shown,
    text_assignment,
    texts_assignment,
    texts_literal,
    write_source,
)

TEXTS = st.text(
    st.one_of(st.characters(), st.sampled_from("\"'\\\n\r\t{}$#%\x00\u202e\ufeff\u2028")),
    max_size=40,
)


def value_of(code: str) -> object:
    """The value that code without side effects assigns to NAME."""
    space: dict[str, object] = {"json": json}
    exec(code, space)
    return space["NAME"]


@given(st.lists(TEXTS, max_size=30))
def test_a_literal_is_the_texts_whatever_characters_they_have(texts: list[str]) -> None:
    code = texts_literal("NAME", texts)
    assert value_of(code) == texts
    assert code.isprintable() or set(code) - {"\n"} <= set(filter(str.isprintable, code))


@given(TEXTS)
def test_the_literal_of_one_text_is_that_text(text: str) -> None:
    assert value_of(text_assignment("NAME", text)) == text


@given(TEXTS, TEXTS)
def test_an_assignment_to_several_names_gives_each_its_text(one: str, two: str) -> None:
    space: dict[str, object] = {"json": json}
    exec(texts_assignment({"ONE": one, "TWO": two}), space)
    assert (space["ONE"], space["TWO"]) == (one, two)


@given(st.lists(st.integers(0, 70_000), max_size=300))
def test_a_literal_is_the_numbers(numbers: list[int]) -> None:
    assert value_of(numbers_literal("NAME", numbers)) == numbers


@given(st.builds(Header, data=TEXTS, why=TEXTS, command=TEXTS), TEXTS)
def test_no_text_of_the_header_leaves_it(header: Header, title: str) -> None:
    text = finished("VALUE = $value", {}, {"value": "1"}, title, header)
    docstring, statement = ast.parse(text).body
    assert isinstance(docstring, ast.Expr)
    assert ast.unparse(statement) == "VALUE = 1"
    assert all(line == line.rstrip() for line in text.split("\n"))
    assert is_as_generated(text)


def test_lines_stay_if_their_facts_hold_and_values_are_not_searched_for_placeholders() -> None:
    code = "A = $a\n#? one\nB = 1\n#? one !two\nC = 1\n#? !one\nD = 1\n#?\nE = 1"
    text = finished(code, {"one": True, "two": True}, {"a": '"$b"'}, "Title", Header("", "", ""))
    assert text.endswith('"""\n\nA = "$b"\nB = 1\nE = 1\n')


def test_lines_of_the_header_have_at_most_100_columns_also_of_wide_characters() -> None:
    header = Header("大" * 200, "word " * 100, "大 word " * 50)
    lines = finished("A = 1", {}, {}, "Title", header).split("\n")
    assert max(len(line) + sum(one == "大" for one in line) for line in lines) <= 100


def test_long_texts_are_cut_for_people() -> None:
    assert shown("x" * 1000, 10) == "xxxxxxxxx…"


def test_the_same_file_is_written_again_and_another_model_replaces_it(tmp_path: Path) -> None:
    first = finished("A = 1", {}, {}, "Title", Header("d", "w", "c"))
    second = finished("A = 2", {}, {}, "Title", Header("d", "w", "c"))
    folder = tmp_path / "new" / "folder"
    path = write_source(folder, first)
    assert write_source(folder, first) == path == folder / "model.py"
    assert write_source(folder, second).read_text() == second


@pytest.mark.parametrize(
    "edited",
    [
        lambda text: text.replace("A = 1", "A = 3"),
        lambda text: text + "\n",
        lambda text: text.replace("Digest: ", "digest "),
        lambda text: text.replace("Why: w", "Why: v"),
        lambda text: "\udcff",
    ],
    ids=["code", "line", "digest", "header", "not text"],
)
def test_an_edited_file_is_never_overwritten(tmp_path: Path, edited: object) -> None:
    assert callable(edited)
    text = finished("A = 1", {}, {}, "Title", Header("d", "w", "c"))
    path = write_source(tmp_path, text)
    path.write_bytes(edited(text).encode("utf-8", "surrogateescape"))
    before = path.read_bytes()
    with pytest.raises(BadInput, match=r"model\.py: was edited, and edited files are never") as one:
        write_source(tmp_path, text.replace("A = 1", "A = 2"))
    assert "\n" not in str(one.value)
    assert path.read_bytes() == before
