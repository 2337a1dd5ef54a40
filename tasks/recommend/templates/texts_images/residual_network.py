"""Small residual networks (K. He et al., "Deep residual learning", 2015)."""

from __future__ import annotations

from trainwright.tasks.recommend.templates.texts_images.image_parts import image_template

_MODEL = r'''
class Block(nn.Module):
    """Two convolutions and a shortcut, which only changes the shape if that is needed."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        change = self.second(functional.relu(self.norm(self.first(inputs))))
        return functional.relu(self.shortcut(inputs) + self.last_norm(change))


class Model(nn.Module):
    """Stages of residual blocks, each of half the height and width; then the mean over places."""

    class_names: Tensor

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.pixels = Pixels()
        # Large images: start at a quarter of their height and width, as ResNet does
        large = min(HEIGHT, WIDTH) >= 96
        self.stem = nn.Sequential(
            nn.Conv2d(CHANNELS, width, 7 if large else 3, 2 if large else 1, 3 if large else 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity(),
        )
        side, before = max(HEIGHT, WIDTH) // (4 if large else 1), width
        blocks: list[nn.Module] = [Block(width, width, 1) for _ in range(depth)]
        for _ in range(3):
            if side >= 8:
                before, width, side = width, 2 * width, side // 2
                blocks.append(Block(before, width, 2))
                blocks += [Block(width, width, 1) for _ in range(depth - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, CLASSES)
        self.register_buffer("class_names", torch.full((CLASS_BYTES,), 32, dtype=torch.uint8))

    def forward(self, inputs: Tensor) -> Tensor:
        state = self.blocks(self.stem(self.pixels(inputs)))
        outputs: Tensor = self.head(state.mean((2, 3)))
        return outputs
'''

RESIDUAL_NETWORK = image_template(
    "residual-network",
    "Residual network",
    _MODEL,
    sizes={
        "small": {"width": 16, "depth": 1},
        "medium": {"width": 32, "depth": 1},
        "large": {"width": 64, "depth": 2},
    },
    learning_rate=0.005,
)
