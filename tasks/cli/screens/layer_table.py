"""A model's layers as rows of a table, indented by depth as in torchinfo.

If a module's children are shown, its counts are its own; at the deepest level shown, they include
all children.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.estimator.structure import Structure


@dataclass(frozen=True)
class LayerRow:
    """A module of the table. Counts are None if only its children have any."""

    depth: int
    name: str
    kind: str
    output_shape: tuple[int, ...]
    parameters: int | None
    forward_flops: float | None


def layer_rows(structure: Structure, depth: int = 3) -> list[LayerRow]:
    """The modules down to a depth; the counts of all rows add up to the model's."""
    rows = []
    # Structures of earlier versions have no modules.
    root = structure.modules[0] if structure.modules else None
    for module in structure.modules or structure.layers:
        level = 0 if module is root else module.name.count(".") + 1
        if level > depth:
            continue
        inside = "" if module is root else f"{module.name}."
        counted = [
            layer
            for layer in structure.layers
            if layer.name == module.name or (level == depth and layer.name.startswith(inside))
        ]
        rows.append(
            LayerRow(
                depth=level,
                name=module.name.rsplit(".", 1)[-1],
                kind=module.kind,
                output_shape=module.output_shape,
                parameters=sum(layer.parameters for layer in counted) if counted else None,
                forward_flops=sum(layer.forward_flops for layer in counted) if counted else None,
            )
        )
    return rows
