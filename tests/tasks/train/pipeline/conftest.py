"""Stages compute in fp64 here, with dropout as ranks key it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainwright.tasks.train.passes import keyed_dropout


@pytest.fixture
def doubles() -> Iterator[None]:
    """Models and masks of a test in fp64."""
    keyed_dropout.install()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    keyed_dropout.end_pass()
