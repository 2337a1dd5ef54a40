"""The part `data.csv` of a job: how numbers and texts stand in a .csv file."""

from __future__ import annotations

import codecs
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainwright.tasks.spec.documents import Document

_NAMED = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "space": " ", "bar": "|"}


class CsvSpec(Document):
    """The form of a .csv file. What is left out is found by the file's first rows, and said."""

    separator: str | None = Field(
        default=None,
        description="the character between columns, such as ; or tab; default: that of , ; tab | "
        "by which the first rows have the same number of columns",
    )
    decimal: Literal[".", ","] | None = Field(
        default=None,
        description="the decimal mark of columns that could be read by either; default: told by "
        "each column's numbers",
    )
    thousands: str | None = Field(
        default=None,
        description="the mark between thousands: , . ' or space; default: told by each column's "
        "numbers",
    )
    encoding: str | None = Field(
        default=None,
        description="such as utf-8, cp1252, latin-1 or utf-16; default: utf-8, utf-16 if the file "
        "begins with its mark, cp1252 if it is neither",
    )
    text_columns: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        default=None,
        description="columns of digits that are codes, not numbers; default: those of whole "
        "numbers with leading zeros, such as 00145",
    )

    @field_validator("separator", "thousands", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return _NAMED.get(value, value) if isinstance(value, str) else value

    @field_validator("separator")
    @classmethod
    def _separates(cls, value: str | None) -> str | None:
        if value is not None and (len(value) != 1 or not value.isascii() or value in '"\r\n'):
            raise ValueError('one ASCII character other than ", such as ; or tab')
        return value

    @field_validator("thousands")
    @classmethod
    def _marks_thousands(cls, value: str | None) -> str | None:
        if value is not None and value not in (",", ".", "'", " "):
            raise ValueError(", . ' or space")
        return value

    @field_validator("encoding")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        try:
            return None if value is None else codecs.lookup(value).name
        except LookupError:
            raise ValueError("an encoding of Python, such as cp1252 or utf-16") from None

    @model_validator(mode="after")
    def _marks_differ(self) -> CsvSpec:
        if self.thousands is not None and self.thousands == self.decimal:
            raise ValueError("thousands: another mark than decimal")
        return self
