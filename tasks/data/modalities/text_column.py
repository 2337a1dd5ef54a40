"""A table's column of texts as a model's only input: rows of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainwright.tasks.data.modalities.tokens import (
    Tokenizer,
    median_words,
    padded,
    text_length,
    token_counts,
)
from trainwright.tasks.data.tables.column_scan import ColumnScan, is_text, shown_type
from trainwright.tasks.data.tables.table_source import listed
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.data_schema import Column
from trainwright.tasks.spec.data_spec import DataSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_LEAST_WORDS = 4
_SAMPLE = 1_000


@dataclass(frozen=True)
class TextArrays:
    """The form of a text column as an input: the first `length` tokens of each text."""

    column: str
    length: int
    columns: list[Column]
    dropped: list[str] = field(default_factory=list)
    vocabularies: dict[str, Any] = field(default_factory=dict)
    _tokenizer: Tokenizer = field(default_factory=Tokenizer)

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The shape of one row, by input."""
        return {"inputs": (self.length,)}

    @property
    def dtypes(self) -> dict[str, str]:
        """The type of each input as it is stored."""
        return {"inputs": "int32"}

    def of(self, batch: Any) -> dict[str, Array]:
        """The input arrays of a record batch, as they are stored. A missing text has no words."""
        texts = batch.column(self.column).to_pylist()
        flat, counts = self._tokenizer("" if text is None else text for text in texts)
        return {"inputs": padded(flat, counts, self.length)}


def text_column(
    scans: Mapping[str, ColumnScan], spec: DataSpec, other: Sequence[str] = ()
) -> str | None:
    """The column whose texts are a table's only input; None if the columns are inputs.

    The job names it, or its task is text-classification and only one column holds texts. Without a
    task, it is the only column besides the target and `other`, if that holds long texts. Raises
    BadInput if the job's column does not exist or holds no texts.
    """
    others = {name: scan for name, scan in scans.items() if name not in (spec.target, *other)}
    texts = [name for name, scan in others.items() if is_text(scan.type)]
    if spec.text is not None:
        if spec.text not in texts:
            held = (
                f", which holds {shown_type(others[spec.text].type)}" if spec.text in others else ""
            )
            raise BadInput(
                f"data.text: got {spec.text!r}{held}; "
                f"allowed: a column of texts of {spec.uri}: {listed(texts) or 'it has none'}"
            )
        return spec.text
    if spec.task == "text-classification":
        if len(texts) != 1:
            raise BadInput(
                f"data.task: got text-classification, but {len(texts)} columns of {spec.uri} hold "
                "texts; allowed: one, or the one that data.text names"
            )
        return texts[0]
    alone = spec.task is None and len(others) == 1 and len(texts) == 1
    return texts[0] if alone and _holds_long_texts(scans[texts[0]]) else None


def _holds_long_texts(scan: ColumnScan) -> bool:
    """Whether more than half of the values differ and the median text has four words or more.

    The median of up to 1,000 of the different texts.
    """
    assert scan.values is not None
    values, _ = scan.values.merged()
    different = scan.values.pruned or len(values) > (scan.rows - scan.missing) / 2
    sample = [values[place].as_py() for place in range(0, len(values), len(values) // _SAMPLE or 1)]
    return different and median_words(sample) >= _LEAST_WORDS


def text_arrays(batches: Iterable[Any], scan: ColumnScan, spec: DataSpec) -> TextArrays:
    """The form of a text column, whose length comes from a pass over the record batches.

    Raises BadInput for missing texts that the job does not permit.
    """
    import numpy as np

    if scan.missing and spec.missing != "keep":
        raise BadInput(
            f"data.uri: {spec.uri}: column {scan.name!r}: {scan.missing} of {scan.rows} texts are "
            "missing; allowed: none, unless data.missing is keep"
        )
    counts = [token_counts(batch.column(scan.name).drop_null().to_pylist()) for batch in batches]
    words = np.concatenate([*counts, np.zeros(scan.missing, np.int64)])
    if not words.any():
        raise BadInput(
            f"data.text: {scan.name!r} of {spec.uri} has no word in {scan.rows} rows; "
            "allowed: texts with words"
        )
    length = text_length(words)
    return TextArrays(
        scan.name, length, [Column(name=scan.name, kind="text", missing=scan.missing)]
    )
