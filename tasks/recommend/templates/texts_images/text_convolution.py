"""Convolutions over embedded words, for texts in which the order of words matters."""

from __future__ import annotations

from typing import Any

from trainwright.tasks.recommend.source_code import Header
from trainwright.tasks.recommend.templates.template import ModelConfig, Template
from trainwright.tasks.recommend.templates.texts_images.class_parts import for_rows
from trainwright.tasks.recommend.templates.texts_images.text_parts import text_source
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

_MODEL = r'''
class Model(nn.Module):
    """Residual convolutions over embedded words, then the mean and the maximum over the text."""

    class_names: Tensor

    def __init__(self, bits: int, width: int, depth: int) -> None:
        super().__init__()
        self.buckets = 2**bits
        self.words = nn.Embedding(self.buckets, width)
        nn.init.normal_(self.words.weight, std=0.1)
        self.word_dropout, self.dropout = nn.Dropout1d(0.2), nn.Dropout(0.5)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, width, 3, padding=1) for _ in range(depth)
        )
        self.head = nn.Linear(2 * width, CLASSES)
        self.register_buffer("class_names", torch.full((CLASS_BYTES,), 32, dtype=torch.uint8))

    def forward(self, inputs: Tensor) -> Tensor:
        real = (inputs > 0).unsqueeze(2)
        # Whole words are dropped: (rows, length, width)
        state = self.word_dropout(self.words(inputs % self.buckets)) * real
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            change = convolution(norm(state).transpose(1, 2)).transpose(1, 2)
            state = state + functional.gelu(change) * real
        mean = state.sum(1) / real.sum(1).clamp_min(1)
        most = torch.where(real, state, -1e4).amax(1).clamp_min(-1e3)
        outputs: Tensor = self.head(self.dropout(torch.cat([mean, most * real.any(1)], 1)))
        return outputs

    def start(self, inputs: Tensor, targets: Tensor) -> None:
        """Start where every text has the same prediction: each class as often as it occurs."""
        counts = targets.bincount(minlength=CLASSES) + 1
        self.head.weight.zero_()
        self.head.bias.copy_((counts / counts.sum()).log())

    def encode(self, values: list[Any]) -> Tensor:
        """The input for raw texts."""
        return tokens(values).to(self.class_names.device)


def build_model(bits: int = $bits, width: int = $width, depth: int = $depth) -> Model:
    """A model with 2**bits embedded words of `width` numbers and `depth` convolutions."""
    return Model(bits, width, depth)
'''


def _source(schema: DataSchema, config: ModelConfig, header: Header) -> str:
    values = {name: str(value) for name, value in config.items()}
    return text_source(schema, "Convolutions over words", _MODEL, header, values)


def _recipe(schema: DataSchema, config: ModelConfig) -> dict[str, Any]:
    return {
        "train.optimizer": {"name": "adamw", "weight_decay": 0.01},
        "train.learning_rate": 0.003,
        "train.warm_up": 0.05,
        "train.schedule": "cosine",
        "train.global_batch_size": for_rows(schema.train_rows, 64, 512),
        "train.epochs": 6,
    }


TEXT_CONVOLUTION = Template(
    name="text-convolution",
    tasks=("text-classification",),
    sizes={
        "small": {"bits": 14, "width": 32, "depth": 1},
        "medium": {"bits": 15, "width": 64, "depth": 2},
        "large": {"bits": 16, "width": 128, "depth": 3},
    },
    source=_source,
    recipe=_recipe,
)
