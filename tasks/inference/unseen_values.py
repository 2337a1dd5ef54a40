"""Counts the values of category columns that no row of the training part has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainwright.tasks.data.tables.column_scan import is_text, plain
from trainwright.tasks.errors import BadInput
from trainwright.tasks.inference.arrow_arrays import text_array
from trainwright.tasks.runs.artefacts.data_schema import Column

_SHOWN = 5
WAY_OUT = "--allow-unseen predicts them as values that the model does not know"


class UnseenValues:
    """The numbers of rows with a value that is not in the training part, by column."""

    def __init__(
        self, columns: Sequence[Column], vocabularies: Mapping[str, Sequence[str]]
    ) -> None:
        """`vocabularies`: the values of the training part, by column."""
        self.counts: dict[str, int] = {}
        self._known = {
            column.name: text_array([*vocabularies[column.name]])
            for column in columns
            if column.kind in ("category", "series") and column.name in vocabularies
        }
        self._rows = dict.fromkeys(self._known, 0)
        self._example: dict[str, str] = {}

    def add(self, batch: Any) -> None:
        """Count the values of a record batch."""
        import pyarrow as pa
        from pyarrow import compute

        for name, known in self._known.items():
            values = batch.column(name)
            if pa.types.is_dictionary(values.type):
                values = values.cast(values.type.value_type)
            if not is_text(values.type):  # there are only nulls
                continue
            present = plain(values).drop_null()
            unseen = present.filter(compute.invert(compute.is_in(present, value_set=known)))
            self._rows[name] += len(present)
            if len(unseen):
                self.counts[name] = self.counts.get(name, 0) + len(unseen)
                self._example.setdefault(name, unseen[0].as_py())

    def require_some_seen(self, where: str) -> None:
        """Raise BadInput for a column without any value that the training part has."""
        for name, count in self.counts.items():
            if count == self._rows[name]:
                known = self._known[name].to_pylist()
                listed = ", ".join(repr(one[:40]) for one in known[:_SHOWN])
                more = " …" if len(known) > _SHOWN else ""
                raise BadInput(
                    f"rows: {where}: the column {name!r} has no value that the model is trained "
                    f"on: got {self._example[name][:40]!r} in its first row of {count}; allowed: "
                    f"{listed}{more}; {WAY_OUT}"
                )


def counted(
    batches: Iterable[Any], columns: Sequence[Column], unseen: UnseenValues
) -> Iterator[Any]:
    """The batches, with numbers of category columns as texts, while unseen values are counted."""
    for batch in batches:
        texts = _with_texts(batch, columns)
        unseen.add(texts)
        yield texts


def _with_texts(batch: Any, columns: Sequence[Column]) -> Any:
    """The batch with numbers of category columns as texts."""
    import pyarrow as pa

    for column in columns:
        if column.kind == "category":
            place = batch.schema.get_field_index(column.name)
            values = batch.column(place)
            if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
                batch = batch.set_column(place, column.name, values.cast(pa.string()))
    return batch
