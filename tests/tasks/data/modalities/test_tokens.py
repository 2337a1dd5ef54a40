"""Texts as tokens: the hash of each word, and the length of a row."""

from __future__ import annotations

import re
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.data.modalities.tokens import (
    BUCKETS,
    LONGEST,
    SHORTEST,
    Tokenizer,
    median_words,
    padded,
    text_length,
    token_counts,
    tokens,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


def by_definition(text: str) -> list[int]:
    words = re.findall(r"\w+|[^\w\s]", text)
    return [zlib.crc32(word.lower().encode()) % 2**20 + 1 for word in words]


@given(st.lists(TEXTS, max_size=20))
def test_many_texts_give_the_tokens_of_each_text(texts: list[str]) -> None:
    flat, counts = Tokenizer()(texts)
    assert flat.tolist() == [token for text in texts for token in by_definition(text)]
    assert counts.tolist() == [len(by_definition(text)) for text in texts]
    assert token_counts(texts).tolist() == counts.tolist()
    assert [tokens(text) for text in texts] == [by_definition(text) for text in texts]


@given(st.lists(TEXTS, min_size=1, max_size=20), st.integers(1, 12))
def test_rows_are_cut_and_padded_to_one_length(texts: list[str], length: int) -> None:
    rows = padded(*Tokenizer()(texts), length)
    expected = [(by_definition(text) + [0] * length)[:length] for text in texts]
    assert rows.tolist() == expected


def test_words_are_told_apart_from_punctuation_and_not_by_case() -> None:
    assert tokens("Don't PANIC!") == tokens("don ' t panic !")
    assert len(tokens("naïve 42 Straße…")) == 4
    assert all(1 <= token <= BUCKETS for token in tokens("every token is in the table"))


def test_an_empty_text_is_a_row_of_padding() -> None:
    rows = padded(*Tokenizer()(["", " \n\t", "one"]), SHORTEST)
    assert rows[:2].tolist() == [[0] * SHORTEST] * 2
    assert rows[2].tolist() == [*by_definition("one"), *[0] * (SHORTEST - 1)]


def test_a_text_without_end_gives_its_first_tokens() -> None:
    flat, counts = Tokenizer()(["word " * 3_000])
    assert (len(flat), counts.tolist()) == (LONGEST, [LONGEST])


def test_the_length_of_a_row_holds_95_of_100_texts_within_bounds() -> None:
    assert text_length(np.arange(1, 101)) == 96
    assert text_length(np.array([1, 2, 3])) == SHORTEST
    assert text_length(np.array([5_000])) == LONGEST
    assert text_length(np.array([], dtype=np.int64)) == SHORTEST


def test_the_median_number_of_words() -> None:
    assert median_words(["one", "one two three four", "one two"]) == 2
    assert median_words([]) == 0
