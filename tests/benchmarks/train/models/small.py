"""The benchmarks' networks; `kind` selects one."""

import torch
from torch import nn


class Sequence(nn.Module):
    """Tokens (N, T) -> logits (N, classes): embedding, recurrent layer, linear on last state."""

    def __init__(self, cell: str, tokens: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.cell = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](width, width, batch_first=True)
        self.out = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(self.embed(tokens.long()))[0][:, -1])


class Scalar(nn.Sequential):
    """A network with one output per row, without the last axis."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).squeeze(-1)


def build_model(kind: str, width: int = 32, classes: int = 10, inputs: int = 64, tokens: int = 4):
    """Build one of: mlp, cnn, lstm, gru, regression (an mlp with one output)."""
    if kind == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * 16, classes),
        )
    if kind in ("lstm", "gru"):
        return Sequence(kind, tokens, width, classes)
    last = 1 if kind == "regression" else classes
    layers = [
        nn.Flatten(),
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, last),
    ]
    return Scalar(*layers) if kind == "regression" else nn.Sequential(*layers)
