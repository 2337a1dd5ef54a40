"""Depthwise separable convolutions for small images, such as 8 × 8 to 64 × 64."""

from __future__ import annotations

from trainwright.tasks.recommend.templates.texts_images.image_parts import image_template

_MODEL = r'''
class Block(nn.Module):
    """Adds to its input what a depthwise and two 1 × 1 convolutions make of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.widen = nn.Conv2d(width, 2 * width, 1)
        self.narrow = nn.Conv2d(2 * width, width, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(width)

    def forward(self, inputs: Tensor) -> Tensor:
        change = self.widen(self.norm(self.depthwise(inputs)))
        outputs: Tensor = inputs + self.last_norm(self.narrow(functional.gelu(change)))
        return outputs


class Model(nn.Module):
    """Stages of blocks, each of half the height and width, until at most 4 × 4 places are left.

    A depthwise convolution over all places is the last: it weighs each place by channel.
    """

    class_names: Tensor

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.pixels = Pixels()
        self.stem = nn.Sequential(
            nn.Conv2d(CHANNELS, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.GELU()
        )
        stages: list[nn.Module] = [Block(width) for _ in range(depth)]
        height, length = HEIGHT, WIDTH
        while max(height, length) > 4:
            strides = (2 if height > 1 else 1, 2 if length > 1 else 1)
            stages.append(nn.Conv2d(width, 2 * width, strides, strides, bias=False))
            width, height, length = 2 * width, height // strides[0], length // strides[1]
            stages += [nn.BatchNorm2d(width), *(Block(width) for _ in range(depth))]
        self.stages = nn.Sequential(*stages)
        self.places = nn.Conv2d(width, width, (height, length), groups=width, bias=False)
        nn.init.constant_(self.places.weight, 1 / (height * length))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)
        self.register_buffer("class_names", torch.full((CLASS_BYTES,), 32, dtype=torch.uint8))

    def forward(self, inputs: Tensor) -> Tensor:
        state = self.places(self.stages(self.stem(self.pixels(inputs))))
        outputs: Tensor = self.head(self.norm(state.flatten(1)))
        return outputs
'''

DEPTHWISE_NETWORK = image_template(
    "depthwise-network",
    "Depthwise convolutions",
    _MODEL,
    sizes={
        "small": {"width": 12, "depth": 1},
        "medium": {"width": 16, "depth": 1},
        "large": {"width": 32, "depth": 2},
    },
    learning_rate=0.01,
)
