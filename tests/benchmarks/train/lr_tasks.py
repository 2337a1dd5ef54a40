"""Ten small tasks for the learning-rate search: five to develop the rule, and five held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Arrays = tuple[Any, Any]
ROWS = 2000


@dataclass(frozen=True)
class LrTask:
    """A task: data (None: the built-in digits), model, optimizer."""

    name: str
    data: Callable[[Path], None] | None
    model: dict[str, Any]
    optimizer: dict[str, Any]
    epochs: int = 10
    batch: int = 64
    task: str | None = None


def _save(arrays: Callable[[np.random.Generator], Arrays], seed: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        inputs, targets = arrays(np.random.default_rng(seed))
        np.savez(path, inputs=inputs, label=targets)

    return write


def _friedman(rng: np.random.Generator) -> Arrays:
    """Ten features, of which five matter (Friedman 1991), standardised."""
    x = rng.random((ROWS, 10))
    y = (
        10 * np.sin(np.pi * x[:, 0] * x[:, 1])
        + 20 * (x[:, 2] - 0.5) ** 2
        + 10 * x[:, 3]
        + 5 * x[:, 4]
    )
    y += rng.normal(0, 1, ROWS)
    return ((x - 0.5) * 12**0.5).astype("float32"), ((y - y.mean()) / y.std()).astype("float32")


def _products(rng: np.random.Generator) -> Arrays:
    """Eight features; a sum of products of pairs."""
    x = rng.normal(size=(ROWS, 8))
    y = (
        x[:, 0] * x[:, 1]
        + np.abs(x[:, 2])
        - 0.5 * x[:, 3] * x[:, 4]
        + 0.3 * x[:, 5]
        + rng.normal(0, 0.3, ROWS)
    )
    return x.astype("float32"), ((y - y.mean()) / y.std()).astype("float32")


def _rings(rng: np.random.Generator) -> Arrays:
    """Twelve features; the class is the spherical shell that contains the first four."""
    x = rng.normal(size=(ROWS, 12))
    return x.astype("float32"), np.digitize((x[:, :4] ** 2).sum(1), [2.0, 3.36, 5.4]).astype(
        "int64"
    )


def _teacher(rng: np.random.Generator) -> Arrays:
    """Twenty features; the class is the output of a random network."""
    x, first, second = (
        rng.normal(size=(ROWS, 20)),
        rng.normal(size=(20, 12)),
        rng.normal(size=(12, 5)),
    )
    return x.astype("float32"), (np.tanh(x @ first / 3) @ second).argmax(1).astype("int64")


def _stripes(rng: np.random.Generator) -> Arrays:
    """Noisy 8 x 8 stripes of six directions."""
    label, phase = rng.integers(0, 6, ROWS), rng.random(ROWS) * 2 * np.pi
    row, column = np.mgrid[0:8, 0:8]
    angle = (label * np.pi / 6)[:, None, None]
    wave = np.sin((row * np.cos(angle) + column * np.sin(angle)) * 1.6 + phase[:, None, None])
    return (wave[:, None] + rng.normal(0, 1.2, (ROWS, 1, 8, 8))).astype("float32"), label


def _majority(rng: np.random.Generator) -> Arrays:
    """The most frequent of three symbols among 15."""
    tokens = rng.integers(0, 3, (ROWS, 15))
    counts = np.stack([(tokens == symbol).sum(1) for symbol in range(3)], 1)
    return tokens.astype("int64"), counts.argmax(1)


def _recall(rng: np.random.Generator) -> Arrays:
    """The symbol after the only marker (3) in a sequence of 12."""
    tokens, at = rng.integers(0, 3, (ROWS, 12)), rng.integers(0, 11, ROWS)
    tokens[np.arange(ROWS), at] = 3
    return tokens.astype("int64"), tokens[np.arange(ROWS), at + 1]


def _parts(rng: np.random.Generator) -> Arrays:
    """Nine features in three groups; the class is the group with the largest product."""
    x = rng.normal(size=(ROWS, 9))
    return x.astype("float32"), x.reshape(ROWS, 3, 3).prod(2).argmax(1)


TEXT = "text-classification"
TABLE, IMAGES, NUMBERS = "tabular-classification", "image-classification", "forecasting"
ADAMW, MOMENTUM, SGD, ADAM = (
    {"name": "adamw", "weight_decay": 0.01},
    {"name": "momentum"},
    {"name": "sgd"},
    {"name": "adam"},
)
DEVELOPED_ON = (
    LrTask(
        "stripes CNN, AdamW",
        _save(_stripes, 1),
        {"kind": "cnn", "width": 8, "classes": 6},
        ADAMW,
        task=IMAGES,
    ),
    LrTask(
        "rings MLP, momentum",
        _save(_rings, 2),
        {"kind": "mlp", "inputs": 12, "classes": 4},
        MOMENTUM,
        task=TABLE,
    ),
    LrTask(
        "recall GRU, momentum",
        _save(_recall, 3),
        {"kind": "gru", "tokens": 4, "classes": 3, "width": 24},
        MOMENTUM,
        task=TEXT,
    ),
    LrTask(
        "products MLP, SGD",
        _save(_products, 4),
        {"kind": "regression", "inputs": 8},
        SGD,
        20,
        task=NUMBERS,
    ),
    LrTask(
        "parts MLP, Adam",
        _save(_parts, 5),
        {"kind": "mlp", "inputs": 9, "classes": 3},
        ADAM,
        20,
        task=TABLE,
    ),
)
HELD_OUT = (
    LrTask("digits CNN, momentum", None, {"kind": "cnn", "width": 8}, MOMENTUM, task=IMAGES),
    LrTask(
        "Friedman MLP, Adam",
        _save(_friedman, 6),
        {"kind": "regression", "inputs": 10},
        ADAM,
        20,
        task=NUMBERS,
    ),
    LrTask(
        "majority LSTM, Adam",
        _save(_majority, 7),
        {"kind": "lstm", "tokens": 3, "classes": 3, "width": 24},
        ADAM,
        task=TEXT,
    ),
    LrTask("digits MLP, AdamW", None, {"kind": "mlp"}, ADAMW, 20, task=IMAGES),
    LrTask(
        "teacher MLP, SGD",
        _save(_teacher, 8),
        {"kind": "mlp", "inputs": 20, "classes": 5},
        SGD,
        20,
        task=TABLE,
    ),
)
