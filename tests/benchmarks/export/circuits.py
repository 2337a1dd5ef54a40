"""Circuits of three small models: mismatches, metric, cells and clocks, predicted beside found.

    python tests/benchmarks/export/circuits.py [--nets mlp cnn table] [--timeout 1200]
    python tests/benchmarks/export/circuits.py --fresh 12 --seed 1

Trains a dense net (64-16-10) and a small CNN on digits, and a dense net on the table wine, exports
each, and prints the figures. Bars: 0 mismatches on all validation rows; metric within 1 point of
the trained model's; cells predicted within 15 %; the dense net in less than 300 s. CPU seconds
stand beside the wall clock, because other work on the machine slows that down.

`--fresh` draws nets of other sizes, data and bit widths by the seed, trains them, and prints cells
as predicted before and after da4ml shares adders, and as synthesised. Bar: within 15 %.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import fresh_circuits
import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits, load_wine

from trainwright.infra.sandbox import SandboxLimits
from trainwright.tasks.export.circuits.to_circuit import to_circuit
from trainwright.tasks.export.exportable import Exportable, ExportOptions, RowsFiles
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

SOURCES = {
    "mlp": "nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)",
    "cnn": "nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), "
    "nn.ReLU(), nn.Flatten(), nn.Linear(32, 10)",
    "table": "nn.BatchNorm1d(13, affine=False), nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3)",
}
_EPOCHS, _BATCH, _RATE = 40, 64, 3e-3


def _rows(name: str) -> tuple[np.ndarray, np.ndarray]:
    if name == "table":
        wine = load_wine()
        return wine.data.astype(np.float32), wine.target
    digits = load_digits()
    return (digits.images / 16).astype(np.float32)[:, None], digits.target


def _trained(name: str, source: str, folder: Path) -> Exportable:
    """A trained model with its rows in files."""
    rows, targets = _rows(name)
    order = np.random.default_rng(0).permutation(len(rows))
    held_out, kept = order[: len(rows) // 5], order[len(rows) // 5 :]
    torch.manual_seed(0)
    space: dict[str, object] = {}
    exec(source, space)
    model = space["build_model"]()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), _RATE)
    inputs, wanted = torch.from_numpy(rows[kept]), torch.from_numpy(targets[kept])
    for _ in range(_EPOCHS):
        for batch in torch.randperm(len(kept)).split(_BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[batch]), wanted[batch]).backward()
            optimizer.step()
    (folder / "source").mkdir(parents=True)
    (folder / "source/net.py").write_text(source)
    save_file(model.state_dict(), folder / "weights.safetensors")
    paths = {}
    for part, numbers in (
        ("validation", rows[held_out]),
        ("targets", targets[held_out]),
        ("calibration", rows[kept]),
        ("calibration_targets", targets[kept]),
    ):
        paths[part] = folder / f"{part}.npy"
        np.save(paths[part], numbers)
    task = "tabular-classification" if name == "table" else "image-classification"
    classes = [str(one) for one in range(int(targets.max()) + 1)]
    schema = DataSchema(
        task=task,
        rows=len(rows),
        train_rows=len(kept),
        validation_rows=len(held_out),
        inputs={"inputs": rows.shape[1:]},
        input_dtypes={"inputs": "float32"},
        target="class",
        target_dtype="int64",
        classes=classes,
        sha256="0" * 64,
    )
    return Exportable(
        folder=folder,
        source=folder / "source",
        entry="net.py",
        config={},
        precision="fp32",
        weights=folder / "weights.safetensors",
        schema=schema,
        vocabularies={},
        run_uri=f"file:///benchmark/{name}",
        data_sha256="0" * 64,
        metric="accuracy",
        trained=0.0,
        rows=RowsFiles(
            {"inputs": paths["validation"]},
            paths["targets"],
            {"inputs": paths["calibration"]},
            paths["calibration_targets"],
        ),
    )


def _cpu_s() -> float:
    return sum(
        one.ru_utime + one.ru_stime
        for one in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def print_fresh(count: int, seed: int, timeout_s: float) -> None:
    """Predicted and synthesised cells of random nets, and the errors together."""
    errors: dict[str, list[float]] = {}
    for one in fresh_circuits.circuits(count, seed, timeout_s):
        print(f"{one.circuit.style}: {one.said}")
        for family, found in one.found.items():
            shown = []
            predictions = {"weights": one.early, "circuit": one.predicted}
            for what, by_family in predictions.items():
                if family in by_family:
                    off = by_family[family] / found - 1
                    errors.setdefault(f"{one.circuit.style}, from {what}", []).append(off)
                    shown.append(f"from {what} {by_family[family]:.0f} ({100 * off:+.0f} %)")
            print(f"  {family}: {found} cells, predicted {', '.join(shown)}", flush=True)
    for what, offs in errors.items():
        sizes = np.abs(offs)
        print(
            f"{what}: mean error {100 * sizes.mean():.1f} %, largest {100 * sizes.max():.0f} %, "
            f"within 15 %: {(sizes <= 0.15).sum()} of {len(offs)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nets", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--style", choices=("pipelined", "sequential", "both"), default="both")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for each tool")
    parser.add_argument("--fresh", type=int, metavar="N", help="cells of N random nets instead")
    parser.add_argument("--seed", type=int, default=0, help="of the random nets")
    given = parser.parse_args()
    if given.fresh:
        print_fresh(given.fresh, given.seed, given.timeout)
        return
    limits = SandboxLimits(given.timeout, 8 * 2**30)
    for name in given.nets:
        build = f"def build_model():\n    return nn.Sequential({SOURCES[name]})\n"
        source = f"from torch import nn\n\n\n{build}"
        with tempfile.TemporaryDirectory() as folder:
            model = _trained(name, source, Path(folder, "model"))
            (out := Path(folder, "out")).mkdir()
            began, cpu_s = time.perf_counter(), _cpu_s()
            report = to_circuit(model, out, ExportOptions(limits, 0.01, given.style))
            wall_s, cpu_s = time.perf_counter() - began, _cpu_s() - cpu_s
        print(
            f"{name}: accuracy {report.metrics.trained:.4f} -> {report.metrics.exported:.4f}, "
            f"{report.vectors} vectors, {report.mismatches} mismatches, latency "
            f"{report.latency_cycles}, energy {report.energy_j:.3g} J, CPU {cpu_s:.0f} s, wall "
            f"{wall_s:.0f} s"
        )
        for one in report.cells:
            off = (one.predicted or 0) / (one.lookup_tables or 1) - 1
            print(
                f"  {one.style} on {one.device}: {one.lookup_tables} cells, predicted "
                f"{one.predicted} ({100 * off:+.0f} %), {one.fmax_mhz} MHz {one.note or ''}"
            )
        print("  " + "; ".join(report.notes), flush=True)


if __name__ == "__main__":
    main()
