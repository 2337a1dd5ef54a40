"""Reads the rows to predict of a .csv file in the form of the data that the model is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.tasks.data.tables.csv_form import file_form
from trainwright.tasks.data.tables.csv_table import csv_form_of, csv_reader, empty, formed
from trainwright.tasks.runs.artefacts.data_schema import Column, CsvForm, DataSchema
from trainwright.tasks.spec.csv_spec import CsvSpec

_BLOCK_BYTES = 1 << 22
_TEXTS = ("category", "text", "series")


@dataclass(frozen=True)
class CsvRows:
    """A .csv file in a known form; `schema` is that of its columns as they are given.

    `names`: as in the file, by name without white space around it; `types`: by name in the file.
    """

    path: Path
    form: CsvForm
    schema: Any
    names: dict[str, str]
    types: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def open(cls, path: Path, model: DataSchema, columns: Sequence[Column]) -> CsvRows:
        """A file by its first block. Raises ValueError, pa.ArrowException.

        Whole numbers are read as float64, because later ones may not be whole, unless the model
        gets their distance from an offset.
        """
        import pyarrow as pa

        texts = [column.name for column in columns if column.kind in _TEXTS]
        form = _form(path, model, [column.name for column in columns], texts)
        # n/a is a missing value only if the model's data has some; it may be a text by mistake.
        unknown = {} if any(one.missing for one in columns) else {"null_values": [""]}
        names = {name.strip(): name for name in csv_reader(path, form, {}).schema.names}
        as_text = {*texts, *form.numbers}
        types = {given: pa.string() for name, given in names.items() if name in as_text}
        with csv_reader(path, form, types, _BLOCK_BYTES, **unknown) as reader:
            inferred = reader.schema
        whole = [one.name for one in columns if one.offset]
        types |= {
            one.name: pa.float64()
            for one in inferred
            if (pa.types.is_integer(one.type) or pa.types.is_null(one.type))
            and one.name.strip() not in (*model.dates, *whole)
        }
        fields = [one.with_type(types.get(one.name, one.type)) for one in inferred]
        schema = formed(empty(pa.schema(fields)), form).schema
        kinds = {one.name: one.type for one in fields}
        return cls(path, form, schema, names, kinds, unknown)

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """These columns, in record batches. Raises ValueError, pa.ArrowException."""
        given = [self.names[name] for name in columns]
        types = {name: self.types[name] for name in given}
        for batch in csv_reader(
            self.path, self.form, types, _BLOCK_BYTES, include_columns=given, **self.options
        ):
            yield formed(batch, self.form)


def _form(path: Path, model: DataSchema, used: Sequence[str], texts: Sequence[str]) -> CsvForm:
    """The file's own separator and encoding, and numbers as in the model's data if it was CSV."""
    trained = model.csv
    if trained is None:
        return csv_form_of(path, CsvSpec(), used, texts)[0]
    form = file_form(path, CsvSpec(), used)
    other = form.encoding in ("cp1252", "latin-1") and trained.encoding != "utf-8"
    encoding = trained.encoding if other else form.encoding
    return form.model_copy(update={"numbers": trained.numbers, "encoding": encoding})
