"""Frozen parameters of a late-multiplied or sharded layer get no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.tasks.train.exchange.peers import Peers
from trainwright.tasks.train.layouts.late_multiply import LateMultiplied
from trainwright.tasks.train.layouts.sharded import Sharded


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_only_trained_parameters_get_gradients(frozen: str) -> None:
    for kind in ("factors", "rows"):
        layer = nn.Linear(3, 2)
        getattr(layer, frozen).requires_grad_(False)
        rows = torch.randn(4, 3)
        if kind == "factors":
            late = LateMultiplied("layer", layer, Peers("torch"), lambda: None)
            late(rows).sum().backward()
            late.finish([late.own(1.0, None)])
        else:
            sharded = Sharded("layer", layer, Peers("torch"))
            sharded.cut([(0, 2)], torch.device("cpu"))
            sharded(rows).sum().backward()
            sharded.finish(1.0)
        trained = {"weight", "bias"} - {frozen}
        found = {name for name, one in layer.named_parameters() if one.grad is not None}
        assert found == trained, kind
