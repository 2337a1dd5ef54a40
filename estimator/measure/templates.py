"""The probes of few-shot calibration: operations and small steps that a device of any kind can run, over a ladder of sizes.

Each template makes, for a rung (0, 1, …) and a device, something to call; a rung does about four times the work of the one below.
Heavy: torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch  # noqa: TID253 - probing runs in a process of its own
from torch import nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253

Call = Callable[[], object]
Template = Callable[[int, torch.device], Call]


def _trained(module: nn.Module, inputs: torch.Tensor, *, optimizer: str | None = None) -> Call:
    """Forward and backward of a module, and its optimizer's step where it has one."""
    module.to(inputs.device)
    rule = torch.optim.AdamW(module.parameters()) if optimizer else None
    if inputs.is_floating_point():
        inputs.requires_grad_()

    def call() -> None:
        module.zero_grad(set_to_none=True)
        inputs.grad = None
        out = module(inputs)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        if rule is not None:
            rule.step()

    return call


def _calls(rung: int, device: torch.device) -> Call:
    x, many = torch.zeros(4, 4, device=device), 8 * 4**rung

    def call() -> None:
        with torch.no_grad():
            for _ in range(many):
                x.add(1)

    return call


def _views(rung: int, device: torch.device) -> Call:
    x, many = torch.zeros(4, 4, requires_grad=True, device=device), 8 * 4**rung

    def call() -> None:
        for _ in range(many):
            x.view(16).view(2, 8).t()

    return call


def _elementwise(rung: int, device: torch.device) -> Call:
    module = nn.Sequential(nn.GELU(), nn.ReLU(), nn.Tanh(), nn.SiLU())
    return _trained(module, torch.randn(64, 32 * 4**rung, device=device))


def _product(rung: int, device: torch.device) -> Call:
    width = 64 * 2**rung
    module = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    return _trained(module, torch.randn(64, width, device=device))


def _tall_product(rung: int, device: torch.device) -> Call:
    module = nn.Sequential(nn.Linear(96, 384), nn.Linear(384, 96))
    return _trained(module, torch.randn(64 * 4**rung, 96, device=device))


def _forward_convolution(rung: int, device: torch.device) -> Call:
    module, images = (
        nn.Conv2d(32, 64, 3, padding=1).to(device),
        torch.randn(2 * 4**rung, 32, 16, 16, device=device),
    )

    def call() -> None:
        with torch.no_grad():
            module(images)

    return call


def _convolution(rung: int, device: torch.device) -> Call:
    channels = 16 * 2 ** min(rung, 4)
    module = nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
    )
    return _trained(module, torch.randn(4 * 4 ** max(0, rung - 4), channels, 16, 16, device=device))


def _pointwise_convolution(rung: int, device: torch.device) -> Call:
    module = nn.Sequential(nn.Conv2d(64, 128, 1), nn.Conv2d(128, 64, 1))
    return _trained(module, torch.randn(2 * 4**rung, 64, 14, 14, device=device))


def _grouped_convolution(rung: int, device: torch.device) -> Call:
    module = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Conv2d(64, 64, 5, padding=2, groups=64)
    )
    return _trained(module, torch.randn(2 * 4**rung, 64, 14, 14, device=device))


def _batch_norm(rung: int, device: torch.device) -> Call:
    return _trained(nn.BatchNorm2d(32), torch.randn(4 * 4**rung, 32, 14, 14, device=device))


def _layer_norm(rung: int, device: torch.device) -> Call:
    return _trained(nn.LayerNorm(192), torch.randn(128 * 4**rung, 192, device=device))


def _softmax(rung: int, device: torch.device) -> Call:
    return _trained(nn.Softmax(-1), torch.randn(128 * 4**rung, 128, device=device))


class _Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


def _attention(rung: int, device: torch.device) -> Call:
    return _trained(
        _Attention(), torch.randn(4 * 2**rung, 4, 32 * 2 ** min(rung, 2), 32, device=device)
    )


def _recurrent(rung: int, device: torch.device) -> Call:
    width = 32 * 2**rung
    return _trained(
        nn.LSTM(width, width, batch_first=True), torch.randn(16, 16, width, device=device)
    )


def _embedding(rung: int, device: torch.device) -> Call:
    indices = torch.randint(0, 1000 * 2**rung, (32 * 4**rung,), device=device)
    return _trained(nn.Embedding(1000 * 2**rung, 64), indices)


def _pooling(rung: int, device: torch.device) -> Call:
    module = nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.AvgPool2d(2))
    return _trained(module, torch.randn(2 * 4**rung, 32, 16, 16, device=device))


class _Reduced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0).mean() + x.mean(-1).sum() + x.amax(-1).sum()


def _reduction(rung: int, device: torch.device) -> Call:
    return _trained(_Reduced(), torch.randn(64 * 4**rung, 64, device=device))


class _Copied(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], -1).transpose(0, 1).contiguous().clone()


def _copy(rung: int, device: torch.device) -> Call:
    return _trained(_Copied(), torch.randn(64 * 4**rung, 64, device=device))


def _dropout(rung: int, device: torch.device) -> Call:
    return _trained(nn.Dropout(0.1), torch.randn(64 * 4**rung, 64, device=device))


def _optimizer(rung: int, device: torch.device) -> Call:
    values = [nn.Parameter(torch.randn(16 * 4**rung, 16, device=device)) for _ in range(8)]
    for one in values:
        one.grad = torch.randn_like(one)
    return torch.optim.AdamW(values).step


def _perceptron_step(rung: int, device: torch.device) -> Call:
    width = 64 * 2**rung
    layers = [
        layer
        for _ in range(3)
        for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())
    ]
    return _trained(
        nn.Sequential(*layers), torch.randn(32, width, device=device), optimizer="adamw"
    )


def _convolutional_step(rung: int, device: torch.device) -> Call:
    layers: list[nn.Module] = []
    for channels, filters in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(channels, filters, 3, padding=1),
            nn.BatchNorm2d(filters),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    module = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)).to(device)
    images = torch.randn(2 * 4**rung, 3, 32, 32, device=device)
    module(images)
    return _trained(module, images, optimizer="adamw")


def _transformer_step(rung: int, device: torch.device) -> Call:
    width = 32 * 2**rung
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
    return _trained(layer, torch.randn(8, 32, width, device=device), optimizer="adamw")


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(500, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(self.embed(tokens))[0]
        return functional.log_softmax(self.head(hidden[:, -1]), -1)


def _recurrent_step(rung: int, device: torch.device) -> Call:
    return _trained(
        _Recurrent(32 * 2**rung), torch.randint(0, 500, (16, 16), device=device), optimizer="adamw"
    )


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
            nn.GroupNorm(4, channels),
            nn.Conv2d(channels, 2 * channels, 1),
            nn.SiLU(),
            nn.Conv2d(2 * channels, channels, 1),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.layers(x)
        return out


def _residual_step(rung: int, device: torch.device) -> Call:
    module = nn.Sequential(
        nn.Conv2d(3, 32, 2, stride=2), _Residual(32), _Residual(32), nn.AdaptiveAvgPool2d(1)
    )
    return _trained(module, torch.randn(2 * 4**rung, 3, 32, 32, device=device), optimizer="adamw")


class _Tabular(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(200, 16) for _ in range(6))
        self.layers = nn.Sequential(
            nn.Linear(96, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [table(x[:, place]) for place, table in enumerate(self.tables)]
        return torch.sigmoid(self.layers(torch.cat(found, -1)))


def _tabular_step(rung: int, device: torch.device) -> Call:
    return _trained(
        _Tabular(128), torch.randint(0, 200, (64 * 4**rung, 6), device=device), optimizer="adamw"
    )


STEPS: dict[str, Template] = {
    "perceptron step": _perceptron_step,
    "convolutional step": _convolutional_step,
    "transformer step": _transformer_step,
    "recurrent step": _recurrent_step,
    "residual step": _residual_step,
    "tabular step": _tabular_step,
}
"""Whole training steps: they tell what one takes beyond its operations."""
TEMPLATES: dict[str, Template] = STEPS | {
    "calls": _calls,
    "views": _views,
    "elementwise": _elementwise,
    "product": _product,
    "tall product": _tall_product,
    "forward convolution": _forward_convolution,
    "convolution": _convolution,
    "pointwise convolution": _pointwise_convolution,
    "grouped convolution": _grouped_convolution,
    "batch norm": _batch_norm,
    "layer norm": _layer_norm,
    "softmax": _softmax,
    "attention": _attention,
    "recurrent": _recurrent,
    "embedding": _embedding,
    "pooling": _pooling,
    "reduction": _reduction,
    "copy": _copy,
    "dropout": _dropout,
    "optimizer": _optimizer,
}
