"""Augmentation depends on seed, epoch and row alone, and does what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.data.modalities.augmentation import Augmentation, augmented

Array = np.ndarray[Any, Any]
KINDS: list[Augmentation] = ["none", "flip", "crop", "flip-crop"]
kinds = st.sampled_from(KINDS)


def images(count: int, height: int = 5, width: int = 9) -> Array:
    """Images without zeros, whose pixels are all different."""
    size = count * 3 * height * width
    return np.arange(1, size + 1, dtype=np.float32).reshape(count, 3, height, width)


@given(kinds, st.integers(0, 2**31 - 1), st.integers(0, 100), st.data())
def test_an_image_does_not_depend_on_the_others_of_its_batch(
    kind: Augmentation, seed: int, epoch: int, data: st.DataObject
) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=8)))
    pixels = images(len(rows))
    whole = augmented(pixels, rows, kind, seed, epoch)
    order = np.array(data.draw(st.permutations(range(len(rows)))))
    assert np.array_equal(augmented(pixels[order], rows[order], kind, seed, epoch), whole[order])
    for at in range(len(rows)):
        alone = augmented(pixels[at : at + 1], rows[at : at + 1], kind, seed, epoch)
        assert np.array_equal(alone[0], whole[at])


@given(kinds, st.integers(0, 1000))
def test_an_image_is_mirrored_or_a_part_of_itself_with_a_border(
    kind: Augmentation, seed: int
) -> None:
    pixels = images(4)
    found = augmented(pixels, np.arange(4), kind, seed, 0)
    for image, changed in zip(pixels, found, strict=True):
        assert any(np.array_equal(changed, one) for one in by_definition(image, kind))


def by_definition(image: Array, kind: str) -> list[Array]:
    """All that may become of an image."""
    parts = [image]
    if "crop" in kind:
        height, width = image.shape[1:]
        top, left = -(-height // 8), -(-width // 8)
        wide = np.pad(image, [(0, 0), (top, top), (left, left)])
        parts = [
            wide[:, y : y + height, x : x + width]
            for y in range(2 * top + 1)
            for x in range(2 * left + 1)
        ]
    return parts + ([part[..., ::-1] for part in parts] if "flip" in kind else [])


def test_every_outcome_is_about_as_frequent() -> None:
    rows = np.arange(9_000)
    image = images(1, 8, 8)
    found = augmented(np.repeat(image, len(rows), axis=0), rows, "flip-crop", 3, 7)
    outcomes, counts = np.unique(found.reshape(len(rows), -1), axis=0, return_counts=True)
    assert len(outcomes) == 18  # 3 places down, 3 across, mirrored or not
    assert counts.min() > 500 - 5 * 500**0.5
    assert counts.max() < 500 + 5 * 500**0.5


@pytest.mark.parametrize("kind", KINDS[1:])
def test_epochs_and_seeds_differ(kind: Augmentation) -> None:
    pixels, rows = images(64), np.arange(64)
    first = augmented(pixels, rows, kind, 0, 0)
    assert not np.array_equal(first, augmented(pixels, rows, kind, 0, 1))
    assert not np.array_equal(first, augmented(pixels, rows, kind, 1, 0))


def test_the_images_given_are_not_changed() -> None:
    pixels = images(8)
    augmented(pixels, np.arange(8), "flip-crop", 0, 0)
    assert np.array_equal(pixels, images(8))


def test_no_image_gives_no_image() -> None:
    assert augmented(images(0), np.arange(0), "flip-crop", 0, 0).shape == (0, 3, 5, 9)
