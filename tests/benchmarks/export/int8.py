"""Models in 8-bit integers beside their float ONNX models: metric, size and speed.

    python tests/benchmarks/export/int8.py [--models mlp cnn …] [--rounds 60] [--fine-tune]

Trains each model for a short time, exports it as `onnx` and `onnx-int8`, and times both files in
turns in one thread, on 1 and on 64 rows. Bars: metric within 0.5 points (of errors: 0.5 %), at
least 3.5 times smaller, not slower. A ratio above 1 means smaller or faster; in brackets the 10th
and 90th percentile of the ratio over rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from trained_models import JOBS, TrainedCase, exportable

from trainwright.infra.sandbox import SandboxLimits
from trainwright.tasks.export.exportable import ExportOptions
from trainwright.tasks.export.model_sandbox import model_request
from trainwright.tasks.export.onnx_models import onnx_compare as compare
from trainwright.tasks.export.onnx_models.onnx_kind import to_onnx, to_onnx_int8

_DIGITS = {"uri": "builtin:digits", "target": "label"}
_WIDE = "nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), "
_SOURCE = "from torch import nn\n\n\ndef build_model():\n    return nn.Sequential({layers})\n"
_RESNET = '''"""A residual network with 64 and 128 channels."""

from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return (x + self.layers(x)).relu()


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), Block(64), Block(64),
        nn.Conv2d(64, 128, 3, 2, 1), nn.BatchNorm2d(128), nn.ReLU(), Block(128), Block(128),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )
'''


def _plain(layers: str) -> str:
    return _SOURCE.format(layers=layers)


def _table(name: str, target: str, task: str) -> dict[str, Any]:
    return {"uri": str(JOBS / "data" / name), "target": target, "task": f"tabular-{task}"}


CASES = {
    "mlp": TrainedCase(
        _DIGITS,
        source=_plain(
            "nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), "
            "nn.Linear(128, 10)"
        ),
    ),
    "wide": TrainedCase(_DIGITS, source=_plain(_WIDE + "nn.Linear(1024, 10)")),
    "cnn": TrainedCase(_DIGITS, 6, source=(JOBS / "cnn.py").read_text(), config={"width": 96}),
    "resnet": TrainedCase(_DIGITS, 3, source=_RESNET),
    "images": TrainedCase(_DIGITS, 5, template=("residual-network", "small")),
    "depthwise": TrainedCase(_DIGITS, 8, template=("depthwise-network", "small")),
    "text": TrainedCase(
        {"uri": str(JOBS / "data/docstrings.parquet"), "target": "topic", "text": "text"},
        4,
        template=("text-convolution", "small"),
    ),
    "ngrams": TrainedCase(
        {"uri": str(JOBS / "data/docstrings.parquet"), "target": "topic", "text": "text"},
        4,
        template=("ngram-bag", "small"),
    ),
    "table": TrainedCase(
        _table("seattle-weather.csv", "weather", "classification"), 8, template=("tabm", "small")
    ),
    "realmlp": TrainedCase(
        _table("concrete.csv", "compressive_strength", "regression"),
        40,
        template=("realmlp", "medium"),
    ),
}


def _ratios(paths: list[Path], feed: dict[str, Any], size: int, rounds: int) -> list[float]:
    """Float time by int8 time, round by round; the two take turns, and which is first changes."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    runs = [onnxruntime.InferenceSession(str(one), options) for one in paths]
    rows = {name: one[np.arange(size) % len(one)] for name, one in feed.items()}
    calls = 1
    ratios = []
    for number in range(rounds + 5):
        spent = [0.0, 0.0]
        for place in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            for _ in range(calls):
                runs[place].run(None, rows)
            spent[place] = time.perf_counter() - began
        if number < 5:
            calls = max(1, round(0.004 / max(spent) * calls))
            continue
        ratios.append(spent[0] / spent[1])
    return ratios


def _feed(model: Any, paths: list[Path]) -> dict[str, Any]:
    """Validation rows as the models take them."""
    rows = compare.ModelRows.open(model_request(model), "validation")
    return compare.typed(compare.session(paths[0]), rows.columns(np.arange(min(64, len(rows)))))


def _measured(name: str, given: argparse.Namespace) -> None:
    limits = SandboxLimits(1800.0, 12 * 2**30)
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        model = exportable(name, CASES[name], Path(place, "model"))
        trained_s = time.perf_counter() - began
        folders = [Path(place, kind) for kind in ("float", "int8")]
        for folder in folders:
            folder.mkdir()
        exact = to_onnx(model, folders[0], ExportOptions(limits))
        options = ExportOptions(limits, given.tolerance, given.fine_tune)
        report = to_onnx_int8(model, folders[1], options)
        paths = [folder / "model.onnx" for folder in folders]
        feed = _feed(model, paths)
        speeds = [_ratios(paths, feed, size, given.rounds) for size in (1, 64)]
        size = paths[0].stat().st_size, paths[1].stat().st_size
    tuned = ", fine-tuned" if report.fine_tuned else ""
    print(
        f"{name:9} {report.metric} {exact.metrics.exported:.4f} -> {report.metrics.exported:.4f}"
        f"{tuned}; size {size[0]:,} -> {size[1]:,} bytes, {size[0] / size[1]:.2f} x; speed 1 row "
        f"{_shown(speeds[0])}, 64 rows {_shown(speeds[1])}; in float: "
        f"{', '.join(report.kept_float) or 'none'}; trained in {trained_s:.0f} s",
        flush=True,
    )


def _shown(ratios: list[float]) -> str:
    low, middle, high = np.percentile(ratios, (10, 50, 90))
    return f"{middle:.2f} x ({low:.2f} to {high:.2f})"


def main() -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=60, help="of timing; default 60")
    parser.add_argument("--tolerance", type=float, default=0.005)
    parser.add_argument("--fine-tune", action="store_true", help="train again where needed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        _measured(name, given)


if __name__ == "__main__":
    main()
