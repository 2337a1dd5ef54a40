"""Logistic regression on the TF-IDF weights of hashed words and n-grams of neighbouring words."""

from __future__ import annotations

from typing import Any

from trainwright.tasks.recommend.source_code import Header
from trainwright.tasks.recommend.templates.template import ModelConfig, Template
from trainwright.tasks.recommend.templates.texts_images.class_parts import for_rows, whole_number
from trainwright.tasks.recommend.templates.texts_images.text_parts import text_source
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

_MOST_WEIGHTS = 2**23
_LEAST_ROWS = 100

_SCALE = 10
"""Weights are this many times smaller than those of TF-IDF, so that few steps reach them."""
_INVERSE_DECAY = 3
"""C of logistic regression: a training row's loss by the penalty of half the squared weights."""

_MODEL = r'''
SCALE = $scale


class Model(nn.Module):
    """One weight per class for each hashed n-gram of 1 to `grams` words; their order is lost.

    A text's n-grams count by (1 + ln tf) · (ln((1 + n) / (1 + df)) + 1), scaled to length 1: tf is
    how often it has the n-gram, df how many of the n training texts have it.
    """

    idf: Tensor
    class_names: Tensor

    def __init__(self, bits: int, grams: int) -> None:
        super().__init__()
        self.buckets, self.grams = 2**bits, grams
        self.weight = nn.Embedding(self.buckets, CLASSES)
        self.bias = nn.Parameter(torch.zeros(CLASSES))
        self.register_buffer("idf", torch.ones(self.buckets))
        self.register_buffer("class_names", torch.full((CLASS_BYTES,), 32, dtype=torch.uint8))

    def forward(self, inputs: Tensor) -> Tensor:
        found, weights = self.weighed(inputs)
        outputs: Tensor = (self.weight(found) * weights.unsqueeze(2)).sum(1)
        return SCALE * outputs + self.bias

    def weighed(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of n-grams, and of each its weight's share; both (rows, grams · LENGTH)."""
        found = self.n_grams(inputs)
        # Where the n-gram begins and ends in the sorted row
        begin = torch.searchsorted(found, found)
        count = torch.searchsorted(found, found, right=True) - begin
        count = count.to(self.idf.dtype)
        share = (1 + count.log()) * self.idf[found] * (found > 0) / count
        length = (share.square() * count).sum(1, keepdim=True).sqrt()
        return found, share / length.clamp_min(1e-6)

    def n_grams(self, inputs: Tensor) -> Tensor:
        """The bucket of each n-gram, sorted by row; 0 is padding."""
        hashes = [inputs]
        for shift in range(1, self.grams):
            following = functional.pad(inputs[:, shift:], (0, shift))
            mixed = (hashes[-1] * 1_000_003 + following) % (2**31 - 1) + 1
            hashes.append(torch.where(following > 0, mixed, 0))
        every = torch.cat(hashes, 1)
        # Multiplicative hashing: the upper of the product's lower 48 bits
        spread = (every * 2_654_435_761 % 2**48) >> 17
        return torch.where(every > 0, spread % (self.buckets - 1) + 1, 0).sort(1).values

    def start(self, inputs: Tensor, targets: Tensor) -> None:
        """Set `idf`; at first, predict each class as often as it occurs."""
        texts = torch.zeros(self.buckets, dtype=torch.float64, device=inputs.device)
        for begin in range(0, len(inputs), 256):
            found = self.n_grams(inputs[begin : begin + 256])
            first = functional.pad(found[:, 1:] != found[:, :-1], (1, 0), value=True)
            texts += found[first].bincount(minlength=self.buckets)
        self.idf.copy_(((1 + len(inputs)) / (1 + texts)).log() + 1)
        self.weight.weight.zero_()
        counts = targets.bincount(minlength=CLASSES) + 1
        self.bias.copy_((counts / counts.sum()).log())

    def encode(self, values: list[Any]) -> Tensor:
        """The input for raw texts."""
        return tokens(values).to(self.class_names.device)


def build_model(bits: int = $bits, grams: int = $grams) -> Model:
    """A model with 2**bits buckets for n-grams of up to `grams` words, before `adapt`."""
    return Model(bits, grams)
'''


def _source(schema: DataSchema, config: ModelConfig, header: Header) -> str:
    bits = whole_number(config, "bits")
    while bits > 12 and 2**bits * len(schema.classes or []) > _MOST_WEIGHTS:
        bits -= 1
    values = {"bits": str(bits), "grams": str(config["grams"]), "scale": str(_SCALE)}
    return text_source(schema, "Bag of n-grams", _MODEL, header, values)


def _recipe(schema: DataSchema, config: ModelConfig) -> dict[str, Any]:
    decay = _SCALE**2 / (_INVERSE_DECAY * max(_LEAST_ROWS, schema.train_rows))
    return {
        "train.optimizer": {
            "name": "adam",
            "weight_decay": float(f"{decay:.3g}"),
            "decay_exclude": "vectors",
        },
        "train.learning_rate": 0.01,
        "train.schedule": "cosine",
        "train.global_batch_size": for_rows(schema.train_rows, 64, 1024),
        "train.epochs": 8,
    }


NGRAM_BAG = Template(
    name="ngram-bag",
    tasks=("text-classification",),
    sizes={
        "small": {"bits": 16, "grams": 1},
        "medium": {"bits": 18, "grams": 2},
        "large": {"bits": 19, "grams": 3},
    },
    source=_source,
    recipe=_recipe,
)
