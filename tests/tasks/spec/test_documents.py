"""Job and pool files are parsed strictly, and a mistake gives one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.documents import (
    Bandwidth,
    Document,
    Duration,
    Latency,
    parse_text,
    read_mapping,
    validated,
)

BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "got a list; allowed: a mapping"),
        ("just words", "got text; allowed: a mapping"),
        ("a: [1, 2", "not valid YAML or JSON (line"),
        ("a: !!python/object/apply:os.system [echo]", "tags"),
        ("a: !custom 1", "tags"),
        (BOMB, "aliases"),
        ("a: 1\na: 2\n", "occurs twice"),
        ("1: a\n", "is not text"),
        ("a: " + "[" * 40 + "]" * 40, "nested deeper"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_a_document_that_is_not_a_mapping_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_text(text, "job.yaml")
    assert says in str(caught.value)
    assert str(caught.value).startswith("job.yaml: ")
    assert "\n" not in str(caught.value)


def test_values_that_yaml_1_1_would_convert_stay_text() -> None:
    parsed = parse_text("a: no\nb: on\nc: 18:00\nd: 2026-01-01\ne: 012\nf: 1_000\n", "x")
    assert parsed == {"a": "no", "b": "on", "c": "18:00", "d": "2026-01-01", "e": 12, "f": "1_000"}


def test_yaml_core_types_and_json_are_read() -> None:
    assert parse_text("a: 1\nb: 1.5\nc: 1e-3\nd: true\ne: null\nf: ~\ng:\n", "x") == {
        "a": 1,
        "b": 1.5,
        "c": 1e-3,
        "d": True,
        "e": None,
        "f": None,
        "g": None,
    }
    assert parse_text('{"a": {"b": [1, 2.5, "c", null]}}', "x") == {"a": {"b": [1, 2.5, "c", None]}}


@pytest.mark.parametrize("make", ["missing", "folder", "binary", "large"])
def test_a_file_that_cannot_be_read_is_bad_input(tmp_path: Path, make: str) -> None:
    path = tmp_path / "job.yaml"
    if make == "folder":
        path.mkdir()
    elif make == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif make == "large":
        path.write_text("a: " + "x" * 1_000_001)
    with pytest.raises(BadInput, match=r"job\.yaml: "):
        read_mapping(path)


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_refused_as_bad_input(text: str) -> None:
    try:
        parsed = parse_text(text, "x")
    except BadInput:
        return
    assert isinstance(parsed, dict)


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [(Duration, 1e-6, 3650 * 86400.0), (Latency, 1e-9, 10.0), (Bandwidth, 125.0, 125e12)],
)
@given(st.data())
def test_quantities_survive_writing_and_reading(
    kind: object, least: float, most: float, data: st.DataObject
) -> None:
    value = data.draw(st.floats(least, most) | st.sampled_from([least, most]))
    adapter: TypeAdapter[float] = TypeAdapter(kind)
    assert adapter.validate_json(adapter.dump_json(value)) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\n- SECRET: 2", "(line 2, column 1)"),
        ("a: [SECRET\nSECRET: 2", "(line 2, column 7): expected ',' or ']', but got ':'"),
        ('a: "\\SECRET"', "(line 1, column 6): found unknown escape character"),
        ("a: 1\nb: !SECRET 2", "(line 2, column 4): tags"),
        ("a: 1\nb: *SECRET", "(line 2, column 4): aliases"),
        ("a: &SECRET 1\nb: &SECRET 1", "(line 2, column 4)"),
        ("SECRET: 1\nSECRET: 2", "(line 2, column 1): a field occurs twice"),
        ("a: 1\n? [SECRET]\n: 2", "(line 2, column 3): a field's name is not text"),
        ("a: 1\nSECRET\x01", "(line 2, column 7): a character that is not allowed"),
        ("%SECRET 1.1", "not valid YAML"),
        ("SECRET " * 20, "got text"),
        ("- SECRET", "got a list"),
        ("SECRET: 1\nname: SECRET!", "data: required field is missing; 1 unknown field"),
        ("host: SECRET\nSECRET: 1\nname: 1", "; 2 unknown fields, such as host"),
        ("root:*:SECRET:\nbin:*:SECRET:", "name: required field is missing"),
    ],
)
def test_an_error_says_where_a_text_is_wrong_and_never_what_it_contains(
    text: str, says: str
) -> None:
    """The text may be any file, passed by mistake."""

    class Example(Document):
        name: int
        data: str

    with pytest.raises(BadInput) as caught:
        validated(Example, parse_text(text, "x.yaml"), "x.yaml")
    assert says in str(caught.value)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("text", ["10", 10, "10 parsecs", "-3s", "0s", "", None, "nan s"])
def test_a_quantity_without_its_unit_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"a number with its unit|more than zero"):
        TypeAdapter(Duration).validate_python(text)
