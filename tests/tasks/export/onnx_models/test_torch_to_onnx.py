"""Conversions to ONNX: names of nodes, and what is refused with its operation and module."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

from trainwright.tasks.errors import BadInput
from trainwright.tasks.export.onnx_models.torch_to_onnx import PlainModel, converted


class Calls(nn.Module):
    """Calls a function of torch, or fails to be traced."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.name == "svd":
            return torch.linalg.svd(x[:, None] * x[:, :, None])[1]
        if self.name == "four rows":
            return x.reshape(4, -1)
        if self.name == "raises":
            raise RuntimeError("no factor, e.g. 1.5, is known. Set TORCH_LOGS.\nMore")
        if self.name == "branch":
            return x if x.sum() > 0 else -x
        return x.kthvalue(2).values


def model_of(*layers: nn.Module) -> PlainModel:
    return PlainModel(nn.Sequential(*layers).eval(), ["x"]).eval()


def test_a_node_is_named_by_its_module_and_says_nothing_else_of_its_source() -> None:
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    made = converted(model_of(inner, nn.Linear(8, 2)), {"x": torch.randn(5, 4)})
    onnx.checker.check_model(made)
    assert [node.name for node in made.graph.node] == ["0.0/linear", "0.1/relu", "1/linear_1"]
    assert not any(node.metadata_props for node in made.graph.node)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("kthvalue", r"model: 1 \(Calls\) uses the operation aten\.kthvalue, which ONNX has no"),
        ("svd", r"model: 1 \(Calls\) uses the operation aten\._linalg_svd, which ONNX has no"),
        (
            "branch",
            r"model: 1 \(Calls\) can't be exported: [^.]* \(unhinted: [^.]*\) "
            r"\(test_torch_to_onnx\.py, line \d+: return x if x\.sum\(\) > 0 else -x\); allowed: ",
        ),
        ("four rows", r"model: can't be exported: Constraints violated \(rows\); allowed: "),
        ("raises", r"can't be exported: no factor, e\.g\. 1\.5, is known; allowed: "),
    ],
)
def test_what_onnx_lacks_is_named_with_its_module(name: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        converted(model_of(nn.Linear(4, 4), Calls(name)), {"x": torch.randn(5, 4)})
