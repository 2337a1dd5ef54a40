"""Divides gradients into chunks, in the order in which the backward pass makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainwright.estimator.structure import LayerFacts


class GradientChunk(NamedTuple):
    """Gradients that are summed at once, when those of the last of `layers` are there."""

    parameters: tuple[str, ...]
    layers: tuple[str, ...]
    elements: int


def chunks_of(layers: Sequence[LayerFacts], most_elements: int) -> list[GradientChunk]:
    """The chunks of these layers' gradients; `layers` are in the order of the forward pass.

    A parameter is not divided: a larger one than a chunk is a chunk of its own.
    """
    found: list[list[tuple[str, str, int]]] = []
    size = 0
    for layer in reversed(layers):
        for name, elements in reversed(layer.parameters.items()):
            if not found or size + elements > most_elements:
                found.append([])
                size = 0
            found[-1].append((name, layer.name, elements))
            size += elements
    return [
        GradientChunk(
            tuple(name for name, _, _ in chunk),
            tuple(dict.fromkeys(layer for _, layer, _ in chunk)),
            sum(elements for _, _, elements in chunk),
        )
        for chunk in found
    ]
