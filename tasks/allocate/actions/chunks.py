"""Divides gradients into chunks, in the order in which the backward pass makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.number_sizes import SINGLE_BYTES, gradient_number_bytes


class GradientChunk(NamedTuple):
    """Gradients that are summed at once, when those of the last of `layers` are there."""

    parameters: tuple[str, ...]
    layers: tuple[str, ...]
    elements: int
    part: int = 0
    """how many earlier chunks begin within the same parameter"""


def chunks_of_bytes(layers: Sequence[LayerFacts], most_bytes: int) -> list[GradientChunk]:
    """The chunks of these layers' gradients, of at most so many bytes; see `chunks_of`."""
    size = max(map(gradient_number_bytes, layers), default=SINGLE_BYTES)
    return chunks_of(layers, max(1, most_bytes // size))


def chunks_of(layers: Sequence[LayerFacts], most_elements: int) -> list[GradientChunk]:
    """The chunks of these layers' gradients; `layers` are in the order of the forward pass.

    A parameter may be in several chunks.
    """
    found: list[list[tuple[str, str, int]]] = []
    parts: list[int] = []
    room = 0
    for layer in reversed(layers):
        for name, elements in reversed(layer.parameters.items()):
            while elements:
                if not room:
                    again = bool(found) and found[-1][0][0] == name
                    parts.append(parts[-1] + 1 if again else 0)
                    found.append([])
                    room = most_elements
                taken = min(room, elements)
                found[-1].append((name, layer.name, taken))
                room, elements = room - taken, elements - taken
    return [
        GradientChunk(
            tuple(name for name, _, _ in chunk),
            tuple(dict.fromkeys(layer for _, layer, _ in chunk)),
            sum(elements for _, _, elements in chunk),
            part,
        )
        for chunk, part in zip(found, parts, strict=True)
    ]
