"""Texts as numbers: each word becomes the number of its hash, so that no vocabulary is kept.

A word is a run of letters, digits and underscores, or one other character that is not white space.
Its token is `crc32(word.lower()) % 2**20 + 1`, of the UTF-8 text; 0 is padding. Equal words have
equal tokens in every run and on every machine (feature hashing, Weinberger et al. 2009).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

BUCKETS = 2**20
"""Tokens are 1 to this many; an embedding table has one row more, for the padding."""
SHORTEST, LONGEST = 8, 512
"""Bounds of the number of tokens that a text is cut or padded to."""

_WORD = re.compile(r"\w+|[^\w\s]")
_REMEMBERED = 1_000_000


def tokens(text: str) -> list[int]:
    """The tokens of one text, in order; an empty text has none."""
    return [token_of(word) for word in _WORD.findall(text)]


def token_of(word: str) -> int:
    """A word's token, 1 to `BUCKETS`."""
    return zlib.crc32(word.lower().encode()) % BUCKETS + 1


class Tokenizer:
    """Makes tokens of many texts. It computes the hash of a frequent word once."""

    def __init__(self) -> None:
        self._known = _TokenOfWord()

    def __call__(self, texts: Iterable[str]) -> tuple[Array, Array]:
        """All tokens in one array (int32), and the number of tokens of each text (int64).

        Each text gives its first `LONGEST` tokens.
        """
        import numpy as np

        token, find = self._known.__getitem__, _WORD.findall
        flat: list[int] = []
        counts: list[int] = []
        for text in texts:
            found = find(text)[:LONGEST]
            flat.extend(map(token, found))
            counts.append(len(found))
        return np.array(flat, dtype=np.int32), np.array(counts, dtype=np.int64)


def token_counts(texts: Iterable[str]) -> Array:
    """The number of tokens of each text (int64)."""
    import numpy as np

    return np.array([len(_WORD.findall(text)) for text in texts], dtype=np.int64)


class _TokenOfWord(dict[str, int]):
    def __missing__(self, word: str) -> int:
        if len(self) >= _REMEMBERED:
            self.clear()
        token = self[word] = token_of(word)
        return token


def text_length(counts: Array) -> int:
    """The number of tokens that texts are cut or padded to: 95 % of the texts fit.

    The 95th percentile of the texts' numbers of tokens, at least `SHORTEST`, at most `LONGEST`.
    """
    import numpy as np

    percentile = float(np.percentile(counts, 95)) if len(counts) else 0.0
    return int(min(max(np.ceil(percentile), SHORTEST), LONGEST))


def padded(flat: Array, counts: Array, length: int) -> Array:
    """The tokens of texts as (texts, length), int32: the first `length`, then zeros."""
    import numpy as np

    rows = np.zeros((len(counts), length), dtype=np.int32)
    place = np.arange(length)
    inside = place < counts[:, None]
    begins = np.cumsum(counts) - counts
    rows[inside] = flat[(begins[:, None] + place)[inside]]
    return rows


def median_words(texts: Sequence[str]) -> int:
    """The median number of words of the texts; 0 if there are none."""
    counts = sorted(len(_WORD.findall(text)) for text in texts)
    return counts[len(counts) // 2] if counts else 0
