"""Twelve families of models on images of 8 × 8, as users write them."""

from __future__ import annotations

FAMILIES = {
    "residual MLP": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(64, 48)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.2),
                          nn.Linear(96, 48))
            for _ in range(2)
        )
        self.leave = nn.Linear(48, 10)

    def forward(self, images):
        found = self.enter(images.flatten(1))
        for block in self.blocks:
            found = found + block(found)
        return self.leave(found)
""",
    "convolutions with norms": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.Dropout2d(0.2),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(12 * 36, 32), nn.Tanh(), nn.Linear(32, 10)
        )

    def forward(self, images):
        return self.head(self.body(images))
""",
    "residual network": """
class Block(nn.Module):
    def __init__(self, one, two):
        super().__init__()
        self.first = nn.Conv2d(one, two, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(two)
        self.second = nn.Conv2d(two, two, 3, padding=1)
        self.short = nn.Conv2d(one, two, 1)

    def forward(self, images):
        found = self.second(torch.relu(self.norm(self.first(images))))
        return torch.relu(found + self.short(images))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(1, 6), nn.MaxPool2d(2), Block(6, 10))
        self.out = nn.Linear(10, 10)

    def forward(self, images):
        return self.out(self.blocks(images).mean((2, 3)))
""",
    "separable convolutions": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 16, 1)
        self.squeeze, self.excite = nn.Linear(16, 4), nn.Linear(4, 16)
        self.out = nn.Linear(16 * 16, 10)

    def forward(self, images):
        found = nn.functional.hardswish(self.point(self.deep(self.stem(images))))
        scale = torch.sigmoid(self.excite(torch.relu(self.squeeze(found.mean((2, 3))))))
        return self.out((found * scale[:, :, None, None]).flatten(1))
""",
    "U-Net": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 6, 3, padding=1)
        self.low = nn.Conv2d(6, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.join = nn.Conv2d(12, 4, 1)
        self.out = nn.Linear(4 * 64, 10)

    def forward(self, images):
        skip = torch.relu(self.down(images))
        low = torch.relu(self.low(nn.functional.max_pool2d(skip, 2)))
        found = torch.relu(self.join(torch.cat([skip, self.up(low)], dim=1)))
        return self.out(found.flatten(1))
""",
    "LSTM": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True)
        self.out = nn.Linear(16, 10)

    def forward(self, images):
        found, _ = self.lstm(self.enter(images[:, 0]))
        return self.out(found[:, -1])
""",
    "two-way GRU": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 10, batch_first=True, bidirectional=True)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(20, 10)

    def forward(self, images):
        found, _ = self.gru(images[:, 0])
        return self.out(self.drop(found.mean(1)))
""",
    "transformer": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.place = nn.Parameter(torch.zeros(8, 16))
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 2
        )
        self.out = nn.Linear(16, 10)

    def forward(self, images):
        return self.out(self.body(self.enter(images[:, 0]) + self.place).mean(1))
""",
    "tied embedding": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(18, 12)
        self.mix = nn.Linear(64 * 12, 12)
        self.rows = nn.Linear(12, 12)

    def forward(self, images):
        tokens = images.flatten(1).round().long().clamp(0, 17)
        found = torch.tanh(self.mix(self.table(tokens).flatten(1)))
        return nn.functional.linear(self.rows(found), self.table.weight)[:, :10]
""",
    "mixer": """
class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.places, self.channels = nn.Linear(16, 16), nn.Linear(12, 12)

    def forward(self, found):
        across = self.places(self.norm(found).transpose(1, 2)).transpose(1, 2)
        found = found + nn.functional.gelu(across)
        return found + nn.functional.gelu(self.channels(self.norm(found)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 12, 2, stride=2)
        self.body = nn.Sequential(Mix(), Mix())
        self.out = nn.Linear(12, 10)

    def forward(self, images):
        return self.out(self.body(self.patches(images).flatten(2).transpose(1, 2)).mean(1))
""",
    "embeddings and products": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(17, 6) for _ in range(3))
        self.dense = nn.Sequential(nn.Linear(61, 24), nn.ReLU(), nn.Linear(24, 6))
        self.top = nn.Linear(6 + 6, 10)

    def forward(self, images):
        values = images.flatten(1)
        tokens = values[:, 20:23].round().long().clamp(0, 16)
        kept = [table(tokens[:, place]) for place, table in enumerate(self.tables)]
        kept.append(self.dense(torch.cat([values[:, :20], values[:, 23:]], dim=1)))
        pairs = [(one * two).sum(1) for n, one in enumerate(kept) for two in kept[n + 1:]]
        return self.top(torch.cat([kept[-1], torch.stack(pairs, dim=1)], dim=1))
""",
    "shared layer, used twice": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.same = nn.Linear(64, 24), nn.Linear(24, 24)
        self.scale = nn.Parameter(torch.ones(24))
        self.out = nn.Linear(24, 10)

    def forward(self, images):
        found = torch.tanh(self.enter(images.flatten(1)))
        for _ in range(2):
            found = torch.tanh(self.same(found)) * self.scale
        return self.out(found)
""",
}
"""The source of each family's class `Net`."""
HEAD = """
import torch
from torch import nn

"""
TAIL = """

def build_model():
    return Net()
"""


def source_of(family: str) -> str:
    """A family's whole source."""
    return HEAD + FAMILIES[family] + TAIL
