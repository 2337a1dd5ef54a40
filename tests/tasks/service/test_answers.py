"""For any numbers in a request, the answer is JSON with finite numbers, or the client's error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import Layer, Operation, Structure
from trainwright.tasks.service.compute.answers import answer

_NUMBERS = st.sampled_from([0, 1, -1, 1e-30, 1e30, -1e30, 10**30, 3.5]) | st.floats(
    -1e30, 1e30, allow_nan=False
)
_LINE = Affine(fixed=1e6, per_sample=1e3)
_STRUCTURE = Structure(
    batch_size=32,
    optimizer="adamw",
    precision="fp32",
    method="fake tensors",
    parameters=1000,
    parameter_bytes=4000,
    forward_flops_per_sample=1e5,
    activation_bytes_per_sample=1e3,
    peak_memory_bytes=_LINE,
    layers=[
        Layer(name="one", kind="Linear", output_shape=(32, 10), parameters=1000, forward_flops=1e5)
    ],
    features={"dense_layers": 1.0},
    operations={"aten.mm": 3},
    trace=[
        Operation(
            kind="aten.mm",
            family="matmul",
            count=3,
            flops=_LINE,
            bytes=_LINE,
            dims=dict.fromkeys("mnk", _LINE),
        )
    ],
).model_dump(mode="json")


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all numbers."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    here = [path] if isinstance(value, int | float) else []
    return here + [found for key, one in items for found in _places(one, (*path, key))]


@given(
    st.dictionaries(st.sampled_from(_places(_STRUCTURE)), _NUMBERS, max_size=3),
    st.sampled_from(["cpu", "nvidia-t4"]),
)
@settings(max_examples=200, deadline=None)
def test_unusual_numbers_give_an_answer_or_bad_input(
    changes: dict[tuple[Any, ...], Any], device_type: str
) -> None:
    structure = json.loads(json.dumps(_STRUCTURE))
    for path, number in changes.items():
        place = structure
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = number
    request = {
        "call": "estimate",
        "structure": structure,
        "batch_size": 64,
        "device_type": device_type,
        "calibration": None,
    }
    found = json.loads(
        answer(request), parse_constant=lambda text: pytest.fail(f"{text} in the answer")
    )
    assert "step_time_s" in found or found["error"]["kind"] == "bad_input"
