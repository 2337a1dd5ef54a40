"""Bytes of the numbers of a layer, in the precision in which its model was traced."""

from __future__ import annotations

from trainwright.estimator.structure import LayerFacts

SINGLE_BYTES = 4
INDEX_BYTES = 8
"""Of the number of a row in a table."""
_HALF_BYTES, _DOUBLE_BYTES = 2, 8


def gradient_number_bytes(layer: LayerFacts) -> int:
    """Of its gradients and late-multiplied factors: half precision is summed in fp32."""
    return max(SINGLE_BYTES, parameter_number_bytes(layer))


def parameter_number_bytes(layer: LayerFacts) -> int:
    """Of its parameters."""
    return _size(layer.parameter_bytes, sum(layer.parameters.values()))


def activation_number_bytes(layer: LayerFacts) -> int:
    """Of the inputs and outputs of a dense layer, and of their gradients.

    With `amp`, products are in half precision, and what a table gives is in fp32.
    """
    dense = layer.dense
    if dense is None:
        return SINGLE_BYTES
    return _size(layer.output_bytes.per_sample, dense.rows_per_sample * dense.outputs)


def _size(total_bytes: float, count: float) -> int:
    """The type's size; fp32 if the bytes are not known."""
    size = round(total_bytes / count) if count and total_bytes else SINGLE_BYTES
    return size if size in (_HALF_BYTES, _DOUBLE_BYTES) else SINGLE_BYTES
