"""The form of a .csv file: its encoding and separator, and which columns hold what.

What the job does not say is found by the file's first 64 MiB, by parsing them with Arrow.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainwright.tasks.data.tables.number_forms import number_forms, shown
from trainwright.tasks.runs.artefacts.data_schema import CsvForm
from trainwright.tasks.spec.csv_spec import CsvSpec

BLOCK_BYTES = 64 * 2**20
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_SAMPLE_BYTES, _PART_BYTES = 2**18, 2**20
_SEP_LINE = re.compile(r"sep=(.)\r?\n")
"""a first line of Excel, which names the separator"""
ZEROS = re.compile(rb"""(?:^|[,;\t|"'\s])-?0[0-9]""")
_CODE = r"^\s*-?0\d+\s*$"


def file_form(path: Path, spec: CsvSpec, used: Sequence[str] = ()) -> CsvForm:
    """A file's encoding and separator. `used`: names of columns that it is expected to have.

    Raises ValueError if the job's separator or encoding is not that of the file.
    """
    with path.open("rb") as file:
        block = file.read(BLOCK_BYTES)
    encoding = spec.encoding or _encoding(block)
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        text = decoder.decode(block[:_SAMPLE_BYTES], len(block) <= _SAMPLE_BYTES)
    except UnicodeDecodeError:
        raise ValueError(
            f"it is not {encoding} text; data.csv.encoding names another encoding"
        ) from None
    text, skipped = text.removeprefix("\ufeff"), 0
    if line := _SEP_LINE.match(text):
        text, skipped = text[line.end() :], 1
    cut = len(block) > _SAMPLE_BYTES
    parsed = {
        separator: names
        for separator in {*SEPARATORS, spec.separator or ",", *(line.groups() if line else ())}
        if separator in text and (names := _columns(text, separator, cut)) is not None
    }
    # The columns that are used tell, else the number of columns; at last, the more usual one.
    usual = {separator: -place for place, separator in enumerate(SEPARATORS)}
    likely = max(
        parsed,
        key=lambda one: (
            sum(name in parsed[one] for name in set(used)),
            len(parsed[one]),
            usual.get(one, -len(usual)),
        ),
        default=",",
    )
    given = spec.separator
    if given not in (None, likely) and len(parsed.get(given or "", [])) < len(parsed[likely]):
        raise ValueError(
            f"data.csv.separator: got {_quoted(given)}; its columns are separated by "
            f"{SEPARATORS.get(likely, 'the sign')}: {_quoted(likely)}"
        )
    chosen = given or (line[1] if line else likely)
    return CsvForm(separator=chosen, encoding=encoding, skipped=skipped)


def _quoted(separator: str | None) -> str:
    return "tab" if separator == "\t" else repr(separator)


def _encoding(block: bytes) -> str:
    """The encoding of a file that begins with these bytes. Raises ValueError if it is no text."""
    if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    first = block[:1000]
    if b"\0" in first:
        low, high = first[::2].count(0), first[1::2].count(0)
        if max(low, high) < len(first) // 4:
            raise ValueError("it is not text: it holds zero bytes")
        return "utf-16-be" if low > high else "utf-16-le"
    letters = _letters(block)
    if "\ufffd" not in letters:
        return "utf-8"
    if any(ord(letter) > 127 and letter != "\ufffd" for letter in letters):
        raise ValueError(
            "its texts are neither all UTF-8 nor all in another encoding; allowed: one, which "
            "data.csv.encoding may name"
        )
    return "latin-1" if re.search(rb"[\x81\x8d\x8f\x90\x9d]", block) else "cp1252"


def _letters(block: bytes) -> set[str]:
    """The characters of UTF-8 text, with U+FFFD for what is none."""
    decoder, letters = codecs.getincrementaldecoder("utf-8")("replace"), set[str]()
    for at in range(0, len(block), _PART_BYTES):
        part = block[at : at + _PART_BYTES]
        if not part.isascii() or decoder.getstate()[0]:
            letters |= set(decoder.decode(part))
    return letters | (set(decoder.decode(b"", True)) if len(block) < BLOCK_BYTES else set())


def _columns(text: str, separator: str, cut: bool) -> list[str] | None:
    """The names of a text's columns; None if its rows have other numbers of columns."""
    import pyarrow as pa
    from pyarrow import csv

    whole = text.rpartition("\n")[0] if cut and "\n" in text else text
    try:
        found = csv.read_csv(
            io.BytesIO(whole.encode()),
            csv.ReadOptions(use_threads=False),
            csv.ParseOptions(delimiter=separator),
        )
    except (pa.ArrowException, ValueError):
        return None
    return [name.strip() for name in found.column_names]


def with_columns(
    form: CsvForm,
    spec: CsvSpec,
    batch: Any,
    as_texts: Callable[[Sequence[str]], Any],
    left: Iterable[str],
    *,
    zeros: bool,
) -> CsvForm:
    """The form with what the columns hold. `batch`: the first rows in the types that Arrow infers.

    `as_texts` gives some columns of them as texts. The columns `left` stay as they are. `zeros`:
    whether there may be numbers with leading zeros. Raises ValueError if a column may be read in
    two ways.
    """
    import pyarrow as pa
    from pyarrow import compute

    schema = batch.schema
    for name in spec.text_columns or ():
        if name not in schema.names:
            raise ValueError(
                f"data.csv.text_columns: got {name!r}; allowed: columns: "
                f"{', '.join(schema.names[:20])}"
            )
    left = {"", *left, *(spec.text_columns or ())}
    whole = [one.name for one in schema if pa.types.is_integer(one.type) and one.name not in left]
    codes = list(spec.text_columns or ())
    if spec.text_columns is None and whole and zeros:
        found = as_texts(whole)
        codes = [
            name
            for name in whole
            if compute.any(compute.match_substring_regex(found.column(name), _CODE)).as_py()
        ]
    texts = {
        one.name: different(batch.column(one.name))
        for one in schema
        if pa.types.is_string(one.type) and one.name not in left
    }
    points = [one.name for one in schema if pa.types.is_floating(one.type) and one.name not in left]
    numbers = number_forms(texts, spec, ["."] if points and spec.decimal != "," else [])
    commas = spec.decimal == "," or any(form.decimal == "," for form in numbers.values())
    if points and commas:  # 1.234 may be 1234 in such a file
        found = as_texts(points)
        texts |= {name: different(found.column(name)) for name in points}
        numbers = number_forms(texts, spec)
        numbers = {
            name: form
            for name, form in numbers.items()
            if name not in points or (form.decimal, form.thousands) != (".", "")
        }
    return form.model_copy(update={"numbers": numbers, "texts": codes})


def different(column: Any) -> Any:
    """The different texts of a column, without white space around them and missing ones."""
    from pyarrow import compute

    texts = compute.utf8_trim_whitespace(column.unique().drop_null())
    return texts.filter(compute.invert(compute.match_substring_regex(texts, r"\A\z")))


def form_notes(form: CsvForm, spec: CsvSpec) -> list[str]:
    """For people: what is unusual about a form, and was found rather than given."""
    notes = []
    if form.separator != "," and spec.separator is None:
        notes.append(f"read with {_quoted(form.separator)} between columns (data.csv.separator)")
    if form.encoding != "utf-8" and spec.encoding is None:
        notes.append(f"read as {form.encoding} (data.csv.encoding)")
    by_form: dict[str, list[str]] = {}
    for name, number in form.numbers.items():
        by_form.setdefault(shown(number), []).append(repr(name))
    for example, names in by_form.items():
        listed = ", ".join(names[:10]) + (" …" if len(names) > 10 else "")
        notes.append(f"{_plural('column', names)} {listed}: numbers are written as {example}")
    if form.texts and spec.text_columns is None:
        listed = ", ".join(map(repr, form.texts[:10])) + (" …" if len(form.texts) > 10 else "")
        notes.append(
            f"{_plural('column', form.texts)} {listed}: digits with leading zeros are codes, not "
            "numbers; data.csv.text_columns: [] reads numbers"
        )
    return notes


def _plural(word: str, names: Sequence[str] | Mapping[str, Any]) -> str:
    return word if len(names) == 1 else f"{word}s"
