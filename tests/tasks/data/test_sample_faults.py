"""What is said of a bad sample: values that are not finite, and where samples are unlike."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from trainwright.tasks.data.sample_faults import difference, not_finite

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("inputs", "targets", "found"),
    [
        ([[1, 2], [3, 4]], [0, 1], None),
        ([[1, 2], [3, NAN]], [0, 1], (1, "inputs: 1 of 2 values is NaN")),
        ([[1, 2], [3, 4]], [-INF, 1], (0, "targets: the value is infinite")),
        ([[1, 2], [NAN, INF]], [0, NAN], (1, "inputs: 1 of 2 values is NaN, 1 is infinite")),
        ([[1, 2], [NAN, 4]], [NAN, 0], (0, "targets: the value is NaN")),
        ([[NAN, 2, NAN]], [0], (0, "inputs: 2 of 3 values are NaN")),
        ([[1j, 2, NAN * 1j]], [0], (0, "inputs: 1 of 3 values is NaN")),
    ],
)
def test_the_first_sample_with_such_a_value_is_found(
    inputs: Any, targets: Any, found: tuple[int, str] | None
) -> None:
    numbers = {"inputs": np.array(inputs)}
    assert not_finite(numbers, np.array(targets), keep_missing=False) == found


def test_kept_missing_values_are_no_fault_but_infinite_ones_are() -> None:
    inputs = {"a": np.array([[NAN, 1], [NAN, INF]]), "words": np.array([["x"], ["y"]])}
    targets = np.array([1, 0])
    assert not_finite(inputs, targets, keep_missing=True) == (1, "a: 1 of 2 values is infinite")
    inputs["a"][1, 1] = NAN
    assert not_finite(inputs, targets, keep_missing=True) is None


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(
    ("sample", "other", "found"),
    [
        ((torch.zeros(3), 1), (torch.ones(3), 2), None),
        (
            (torch.zeros(3), 1),
            (torch.zeros(2), 1),
            ("inputs", "Tensor (3,) float32", "Tensor (2,) float32"),
        ),
        (
            (torch.zeros(2), 1),
            (np.zeros(2), 1),
            ("inputs", "Tensor (2,) float32", "ndarray (2,) float64"),
        ),
        ((0, None), (0, 1.0), ("targets", "None", "a value of type float")),
        ((0, 1, 2), (0, 1), ("", "a tuple of 3", "a tuple of 2")),
        (
            ({"a": 0}, 1),
            ({"a": 0, "b": 0}, 1),
            ("inputs", "a dict with the keys 'a'", "a dict with the keys 'a', 'b'"),
        ),
        (
            ({"a": [0, Pair(1, "x")]}, 1),
            ({"a": [0, Pair(1, 2)]}, 1),
            ("inputs['a'][1][1]", "a value of type str", "a value of type int"),
        ),
    ],
)
def test_where_samples_are_unlike(
    sample: Any, other: Any, found: tuple[str, str, str] | None
) -> None:
    assert difference(sample, other) == found
