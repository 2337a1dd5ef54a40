"""Divides gradients into chunks, in the order in which the backward pass makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainwright.estimator.structure import LayerFacts


class Piece(NamedTuple):
    """Elements [begin, end) of a parameter, as one flat row."""

    parameter: str
    begin: int
    end: int


class Chunk(NamedTuple):
    """What is summed at once. It is complete when the layer `last` has its weight gradients."""

    pieces: tuple[Piece, ...]
    layers: tuple[str, ...]

    @property
    def elements(self) -> int:
        """The number of gradients."""
        return sum(piece.end - piece.begin for piece in self.pieces)


def chunks_of(layers: Sequence[LayerFacts], most_elements: int) -> list[Chunk]:
    """The chunks of these layers' gradients; `layers` are in the order of the forward pass.

    A parameter larger than a chunk is divided. A smaller one is kept whole, so that a chunk is
    complete as soon as possible. Raises ValueError if a chunk would hold nothing.
    """
    if most_elements < 1:
        raise ValueError(f"a chunk of {most_elements} elements; allowed: one or more")
    found: list[Chunk] = []
    pieces: list[Piece] = []
    names: list[str] = []
    room = most_elements

    def close() -> None:
        nonlocal room
        if pieces:
            found.append(Chunk(tuple(pieces), tuple(dict.fromkeys(names))))
        pieces.clear()
        names.clear()
        room = most_elements

    for layer in reversed(layers):
        for name, elements in reversed(layer.parameters.items()):
            if elements > room:
                close()
            for begin in range(0, elements, most_elements):
                end = min(elements, begin + most_elements)
                if end - begin > room:
                    close()
                pieces.append(Piece(name, begin, end))
                names.append(layer.name)
                room -= end - begin
    close()
    return found
