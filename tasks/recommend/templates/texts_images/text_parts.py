"""What the sources of all models for texts share: how a text becomes tokens."""

from __future__ import annotations

from trainwright.tasks.recommend.source_code import Header, text_assignment
from trainwright.tasks.recommend.templates.texts_images.class_parts import (
    classifier_source,
    single_input,
)
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

_TOKENS = r'''
# Of each text, as many words count
LENGTH = $length
WORDS = re.compile(r"\w+|[^\w\s]")


def tokens(texts: list[Any]) -> Tensor:
    """A number from 1 to 2**20 for each word, (texts, LENGTH); then 0. None has no words."""
    rows = []
    for text in texts:
        words = [word.lower() for word in WORDS.findall(text or "")[:LENGTH]]
        found = [zlib.crc32(word.encode("utf-8", "surrogatepass")) % 2**20 + 1 for word in words]
        rows.append(found + [0] * (LENGTH - len(found)))
    return torch.tensor(rows, dtype=torch.int64)


def random_inputs(batch_size: int) -> Tensor:
    """Tokens of random words."""
    return torch.randint(2**20, (batch_size, LENGTH)) + 1
'''


def text_source(
    schema: DataSchema, kind: str, model: str, header: Header, values: dict[str, str]
) -> str:
    """The source of a model for texts; `model` is code as in `classifier_source`."""
    (length,) = single_input(schema, "text-classification", 1)
    texts = [column.name for column in schema.columns if column.kind == "text"]
    shared = {
        "column": text_assignment("COLUMN", texts[0] if texts else "text"),
        "raw": "texts",
        "sample": '"some words", None',
        "length": str(length),
    }
    code = f"{_TOKENS.strip()}\n\n\n{model.strip()}"
    return classifier_source(schema, kind, code, header, words=True, values={**shared, **values})
