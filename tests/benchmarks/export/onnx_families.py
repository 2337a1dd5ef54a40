"""How exactly ONNX models compute what their torch models do, by family of models.

    python tests/benchmarks/export/onnx_families.py [NAME …]

Each family is a small model with random weights; each template of `recommend` is generated and
adapted to random rows. Bar: outputs differ by at most 1e-5 of their size, for batches of 1 to 257
rows. Generated models for tables get raw columns, and are also compared with their own `predict`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / name) for name in (".", "tasks", "tasks/recommend")]

import network_case  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import table_case  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from trainwright.tasks.errors import BadInput  # noqa: E402
from trainwright.tasks.export.onnx_models import onnx_compare as compare  # noqa: E402
from trainwright.tasks.export.onnx_models import whole_graph  # noqa: E402
from trainwright.tasks.export.onnx_models.torch_to_onnx import PlainModel, converted  # noqa: E402
from trainwright.tasks.export.row_differences import output_sizes, row_errors  # noqa: E402
from trainwright.tasks.recommend.templates import templates  # noqa: E402

ROWS = 257
Rows = dict[str, torch.Tensor]


class Recurrent(nn.Module):
    """A recurrent layer; its last state is classified."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.head = kind(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layer(x)[0][:, -1])


class Residual(nn.Module):
    """A block of two convolutions beside the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.norms[1](self.two(self.norms[0](self.one(x)).relu()))


class Encoder(nn.Module):
    """Tokens, embedded with their places, through two layers of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Parameter(torch.randn(12, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layers(self.words(x) + self.places).mean(1))


class Bag(nn.Module):
    """The mean of embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(50, 16, mode="mean"), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.words(x))


class ResponseNorm(nn.Module):
    """Global response normalisation (S. Woo et al., ConvNeXt V2, 2023) after a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.randn(1, 8, 1, 1))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.conv(x)
        size = x.norm(dim=(2, 3), keepdim=True)
        x = x + self.scale * x * (size / (size.mean(1, keepdim=True) + 1e-6))
        return self.head(x.mean((2, 3)))


class TwoInputs(nn.Module):
    """Numbers and codes, embedded and joined."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(14, 1)

    def forward(self, x: Rows) -> Any:
        return self.head(torch.cat([x["numbers"], self.embed(x["codes"]).flatten(1)], 1)).squeeze(1)


def _images() -> Rows:
    return {"inputs": torch.rand(ROWS, 1, 8, 8)}


def _numbers() -> Rows:
    return {"inputs": torch.randn(ROWS, 10)}


def _tokens() -> Rows:
    return {"inputs": torch.randint(50, (ROWS, 12))}


def _steps() -> Rows:
    return {"inputs": torch.randn(ROWS, 12, 8)}


def _two() -> Rows:
    return {"numbers": torch.randn(ROWS, 6), "codes": torch.randint(9, (ROWS, 2))}


_conv = nn.Conv2d
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Rows]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)), _numbers),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.SELU(), nn.Linear(32, 3)),
        _numbers,
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.Mish(), nn.Linear(32, 3)),
        _numbers,
    ),
    "cnn": (
        lambda: nn.Sequential(
            _conv(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 3)
        ),
        _images,
    ),
    "residual": (
        lambda: nn.Sequential(
            _conv(1, 8, 3), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
        ),
        _images,
    ),
    "depthwise": (
        lambda: nn.Sequential(
            _conv(1, 8, 1),
            _conv(8, 8, 3, groups=8),
            _conv(8, 16, 1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(576, 3),
        ),
        _images,
    ),
    "group norm": (
        lambda: nn.Sequential(
            _conv(1, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 3)
        ),
        _images,
    ),
    "transposed": (
        lambda: nn.Sequential(
            _conv(1, 4, 3), nn.ConvTranspose2d(4, 2, 2, 2), nn.Upsample(scale_factor=2)
        ),
        _images,
    ),
    "response norm": (ResponseNorm, _images),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(12, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)),
        _steps,
    ),
    "gru": (lambda: Recurrent(nn.GRU), _steps),
    "lstm": (lambda: Recurrent(nn.LSTM), _steps),
    "encoder": (Encoder, _tokens),
    "embedding bag": (Bag, _tokens),
    "two inputs": (TwoInputs, _two),
}


def _sizes(core: onnx.ModelProto, model: PlainModel, rows: Rows) -> float:
    """The greatest error over batches of every size, 1 to ROWS."""
    run, worst = compare.session(core), 0.0
    with torch.no_grad():
        exact = [one.numpy() for one in model(*(rows[name] for name in model.names))]
    sizes = output_sizes(exact)
    for size in range(1, ROWS + 1):
        feed = {name: one[:size].numpy() for name, one in rows.items()}
        found = run.run(None, compare.typed(run, feed))
        errors = row_errors([one[:size] for one in exact], found, sizes)
        worst = max(worst, float(errors.max()))
    return worst


def _disturb(model: nn.Module) -> None:
    """Change the weights of a model whose start is a constant."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


def _converted(model: nn.Module, rows: Rows) -> tuple[onnx.ModelProto, float]:
    plain = PlainModel(model.eval(), list(rows)).eval()
    core = converted(plain, rows)
    onnx.checker.check_model(core, full_check=True)
    return core, _sizes(core, plain, rows)


def _of_table(name: str, classes: int, folder: Path) -> tuple[float, str]:
    """The error of a template for tables, and how it compares with `predict` on raw rows."""
    data = table_case.schema(4, 3, True, classes)
    made = table_case.generated(templates()[name], data, folder)
    raw = table_case.rows(data)
    inputs, targets = table_case.batch(data, raw)
    names = table_case.vocabularies(data)
    model = made.build_model()
    assert made.adapt is not None
    assert made.predict is not None
    with torch.no_grad():
        made.adapt(model, inputs, targets, names)
        _disturb(model)
    core, error = _converted(model, {one: rows[:ROWS] for one, rows in inputs.items()})
    run = compare.session(whole_graph.whole(core, data, names, {}))
    feed: dict[str, Any] = {}
    for column in data.columns:
        values = raw[column.name]
        feed[column.name] = (
            np.array([np.nan if one is None else one for one in values], np.float32)
            if column.kind == "number"
            else np.array([one or "" for one in values], dtype=object)
        )
    shown = [one.name for one in run.get_outputs()]
    found = dict(zip(shown, run.run(None, feed), strict=True))
    wanted = made.predict(model, raw)
    if classes:
        equal = np.mean([a == b for a, b in zip(found["label"], wanted["prediction"], strict=True)])
        return error, f"{100 * equal:.1f} % labels as `predict`"
    off = row_errors([np.array(wanted["prediction"])], [found["output"]]).max()
    return error, f"differs by {off:.1e} from `predict`"


def _of_network(name: str, task: str, folder: Path) -> float:
    """The error of a template for texts, images or series."""
    template = templates()[name]
    series = network_case.Series(known=2, named=True)
    data = {
        "text-classification": network_case.texts(),
        "image-classification": network_case.images(),
    }.get(task) or series.schema()
    made = table_case.generated(template, data, folder)
    torch.manual_seed(0)
    if task == "forecasting":
        inputs, targets = series.windows()
    elif task == "text-classification":
        shape = data.inputs["inputs"]
        inputs = torch.randint(2**20, (ROWS, *shape)) * (torch.arange(shape[0]) < 6)
        targets = torch.arange(ROWS) % len(network_case.CLASSES)
    else:
        inputs, targets = torch.rand(ROWS, *data.inputs["inputs"]), torch.arange(ROWS) % 3
    names = {one.name: network_case.NAMES for one in data.columns if one.kind == "series"}
    names |= {data.target: data.classes} if data.classes else {}
    model = made.build_model()
    assert made.adapt is not None
    with torch.no_grad():
        made.adapt(model, inputs, targets, names)
        _disturb(model)
    given = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    rows = {
        one: torch.cat([value] * (ROWS // len(value) + 1))[:ROWS] for one, value in given.items()
    }
    return _converted(model, rows)[1]


def main() -> None:
    """Print the greatest relative error of each family over batches of 1 to 257 rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these families or templates")
    chosen = parser.parse_args().names
    torch.manual_seed(0)
    torch.set_num_threads(1)
    errors: list[float] = []

    def tell(name: str, error: float, began: float, said: str = "") -> None:
        errors.append(error)
        print(f"{name:28} {error:.1e}  {time.perf_counter() - began:5.1f} s  {said}", flush=True)

    for name, (build, rows) in FAMILIES.items():
        if not chosen or name in chosen:
            began = time.perf_counter()
            tell(name, _converted(build(), rows())[1], began)
    for name, template in templates().items():
        if chosen and name not in chosen:
            continue
        for task in template.tasks:
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                if task.startswith("tabular"):
                    classes = 3 if task.endswith("classification") else 0
                    tell(
                        f"{name}, {task[8:]}",
                        *_order(_of_table(name, classes, Path(folder)), began),
                    )
                    continue
                try:
                    tell(name, _of_network(name, task, Path(folder)), began)
                except BadInput as error:
                    print(f"{name:28} refused  {error}", flush=True)
    print(f"{len(errors)} models, largest error {max(errors):.1e}; bar 1e-5")


def _order(found: tuple[float, str], began: float) -> tuple[float, float, str]:
    return found[0], began, found[1]


if __name__ == "__main__":
    main()
