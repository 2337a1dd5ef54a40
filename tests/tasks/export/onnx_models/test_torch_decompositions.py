"""Operations that ONNX lacks compute what torch's do."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.export.onnx_models.torch_decompositions import searchsorted

numbers = st.integers(-5, 5)


@given(
    rows=st.integers(1, 3),
    size=st.integers(1, 9),
    count=st.integers(1, 5),
    right=st.booleans(),
    data=st.data(),
)
def test_places_in_sorted_rows_are_those_of_torch(
    rows: int, size: int, count: int, right: bool, data: st.DataObject
) -> None:
    def drawn(width: int) -> torch.Tensor:
        values = data.draw(st.lists(numbers, min_size=rows * width, max_size=rows * width))
        return torch.tensor(values).reshape(rows, width)

    known, values = drawn(size).sort(1).values, drawn(count)
    assert searchsorted(known, values, right=right).equal(
        torch.searchsorted(known, values, right=right)
    )
    first = known[0].contiguous()
    assert searchsorted(first, values, right=right).equal(
        torch.searchsorted(first, values, right=right)
    )
