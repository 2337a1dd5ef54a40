"""The types of a model's tensors in each precision."""

from __future__ import annotations

import pytest
import torch

from trainwright.estimator.precision import cast


@pytest.mark.parametrize(
    ("precision", "real", "complex_"),
    [
        ("fp32", torch.float32, torch.complex64),
        ("fp64", torch.float64, torch.complex128),
        ("bf16", torch.bfloat16, torch.complex64),
        ("amp", torch.float32, torch.complex64),
    ],
)
def test_every_tensor_gets_the_precision_and_complex_ones_stay_complex(
    precision: str, real: torch.dtype, complex_: torch.dtype
) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("turns", torch.tensor([1j, 1 + 2j]))
    model.register_buffer("count", torch.tensor(3))
    cast(model, precision)
    assert (model.weight.dtype, model.turns.dtype, model.count.dtype) == (
        real,
        complex_,
        torch.int64,
    )
    assert model.turns.tolist() == [1j, 1 + 2j]
