"""The templates for images on optdigits, against a support vector machine on the same splits.

    python tests/benchmarks/recommend/images.py
    python tests/benchmarks/recommend/images.py --inner    # while developing

A fifth of the rows is held out, by seed. With --inner, a fifth of the other rows takes their place.
No augmentation. Data: see package_data.py.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from package_data import optdigits
from plain_training import accuracy, schema_of, split, trained
from sklearn.svm import SVC

from trainwright.tasks.recommend.templates import templates

BAR = 0.987


def main() -> None:
    """Print each template's accuracy by size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--inner", action="store_true", help="measure on training rows")
    parser.add_argument("--seeds", type=int, default=5, help="number of splits; default 5")
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "large"])
    parser.add_argument("--templates", nargs="+", default=["depthwise-network", "residual-network"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    pixels, labels = optdigits()
    inputs, targets = torch.from_numpy(pixels), torch.from_numpy(labels)
    parts = []
    for seed in range(asked.seeds):
        rows, held = split(len(labels), seed)
        if asked.inner:
            first, second = split(len(rows), 1000 + seed)
            rows, held = rows[first], rows[second]
        parts.append((rows, held))
    flat = pixels.reshape(len(pixels), -1)
    machine = [SVC(C=10).fit(flat[a], labels[a]).score(flat[b], labels[b]) for a, b in parts]
    print(f"optdigits: {len(labels)} images\n  support vector machine: {_shown(machine)}")
    for template in asked.templates:
        for size in asked.sizes:
            found, started = [], time.process_time()
            for seed, (rows, held) in enumerate(parts):
                schema = schema_of("image-classification", inputs[rows], classes=10)
                model, _ = trained(
                    templates()[template], size, schema, inputs[rows], targets[rows], seed
                )
                found.append(accuracy(model, inputs[held], targets[held]))
            spent = (time.process_time() - started) / len(parts)
            verdict = "met" if np.mean(found) >= BAR else "missed"
            print(
                f"  {template} {size}: {_shown(found)} (bar {BAR}: {verdict}); "
                f"{spent:.0f} s of CPU a fit",
                flush=True,
            )


def _shown(found: list[float]) -> str:
    each = " ".join(f"{one:.4f}" for one in found)
    return f"{np.mean(found):.4f} (sd {np.std(found):.4f}: {each})"


if __name__ == "__main__":
    main()
