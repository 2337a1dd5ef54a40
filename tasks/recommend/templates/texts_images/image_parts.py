"""What all models for images share: pixels and their scaling, the start, the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.tasks.recommend.source_code import Header
from trainwright.tasks.recommend.templates.template import ModelConfig, Template
from trainwright.tasks.recommend.templates.texts_images.class_parts import (
    classifier_source,
    for_rows,
    single_input,
)
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

_PIXELS = r'''
CHANNELS, HEIGHT, WIDTH = $channels, $height, $width


class Pixels(nn.Module):
    """Pixels from 0 to 1, scaled to mean 0 and standard deviation 1 in each channel."""

    centre: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.full((CHANNELS, 1, 1), 0.5))
        self.register_buffer("scale", torch.full((CHANNELS, 1, 1), 2.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.centre) * self.scale

    def start(self, inputs: Tensor) -> None:
        """Set the buffers from training rows."""
        pixels = inputs.double().transpose(0, 1).flatten(1)
        self.centre.copy_(pixels.mean(1).reshape(CHANNELS, 1, 1))
        self.scale.copy_((1 / (pixels.std(1) + 0.01)).reshape(CHANNELS, 1, 1))

    def encode(self, values: list[Any]) -> Tensor:
        """Pixels of raw images, uint8 tensors (channels, height, width) of any size.

        Tensors of another type hold pixels from 0 to 1. Grey and RGB become what the model has, and
        transparency is ignored.
        """
        images = []
        for value in values:
            image = torch.as_tensor(value).to(self.centre.device)
            image = image.float() / 255 if image.dtype == torch.uint8 else image.float()
            image = image[: 3 if len(image) > 2 else 1]
            if len(image) == 3 and CHANNELS == 1:
                grey = torch.tensor([0.299, 0.587, 0.114], device=image.device)
                image = torch.einsum("c,chw->hw", grey, image)[None]
            image = image.expand(CHANNELS, -1, -1)
            if image.shape[1:] != (HEIGHT, WIDTH):
                image = functional.interpolate(
                    image[None], (HEIGHT, WIDTH), mode="bilinear", antialias=True
                )[0]
            images.append(image.to(self.centre.dtype))
        return torch.stack(images)


def random_inputs(batch_size: int) -> Tensor:
    """Images of random pixels."""
    return torch.rand(batch_size, CHANNELS, HEIGHT, WIDTH)
'''


_END = r'''
    def start(self, inputs: Tensor, targets: Tensor) -> None:
        """Start as scaled pixels, blocks that change nothing, and the classes' frequencies."""
        self.pixels.start(inputs)
        for block in self.modules():
            if isinstance(block, Block):
                nn.init.zeros_(block.last_norm.weight)
        counts = targets.bincount(minlength=CLASSES) + 1
        self.head.bias.copy_((counts / counts.sum()).log())

    def encode(self, values: list[Any]) -> Tensor:
        """The input for raw images."""
        return self.pixels.encode(values)


def build_model(width: int = $channels_of_stem, depth: int = $depth) -> Model:
    """A model whose first stage has `width` channels, with `depth` blocks per stage."""
    return Model(width, depth)
'''


def image_template(
    name: str, kind: str, model: str, sizes: Mapping[str, ModelConfig], learning_rate: float
) -> Template:
    """A family of models for images. `kind`: words for the first line of its sources.

    `model` is code that ends within `class Model`, whose `Block`s have a `last_norm`. It is
    configured by `width`, the channels of the first stage, and `depth`, the blocks per stage.
    """

    def source(schema: DataSchema, config: ModelConfig, header: Header) -> str:
        return _source(schema, kind, model, header, config)

    def recipe(schema: DataSchema, config: ModelConfig) -> dict[str, Any]:
        return {
            "train.optimizer": {"name": "adamw", "weight_decay": 0.05},
            "train.learning_rate": learning_rate,
            "train.warm_up": 0.05,
            "train.schedule": "cosine",
            "train.global_batch_size": for_rows(schema.train_rows, 64, 512),
            "train.epochs": 20,
            "train.label_smoothing": 0.1,
        }

    return Template(name, ("image-classification",), sizes, source, recipe)


def _source(schema: DataSchema, kind: str, model: str, header: Header, config: ModelConfig) -> str:
    channels, height, width = single_input(schema, "image-classification", 3)
    values = {
        "column": 'COLUMN = "image"',
        "raw": "images as in `Pixels.encode`",
        "sample": "torch.zeros(CHANNELS, HEIGHT, WIDTH)",
        "channels": str(channels),
        "height": str(height),
        "width": str(width),
        "channels_of_stem": str(config["width"]),
        "depth": str(config["depth"]),
    }
    code = f"{_PIXELS.strip()}\n\n\n{model.strip()}\n\n{_END.strip(chr(10))}"
    return classifier_source(schema, kind, code, header, words=False, values=values)
