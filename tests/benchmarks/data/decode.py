"""Images decoded in a second: batches of packed images, beside a plain loop over files.

    python tests/benchmarks/data/decode.py

The images are parts of two photographs that scikit-learn ships, in different sizes. Both ways give
the same shape. The plain loop opens, decodes and resizes one file after another with Pillow.
Batches are decoded on one thread a core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from trainwright.tasks.data.modalities.images import (
    ImageFiles,
    ImageRows,
    ImageShape,
    PackedImages,
    common_shape,
    pack,
)


def photographs(folder: Path, count: int, suffix: str, side: int) -> list[str]:
    """Files with parts of the photographs, enlarged to about `side` pixels."""
    random = np.random.default_rng(0)
    whole = [Image.fromarray(one) for one in load_sample_images().images]
    names = []
    for number in range(count):
        image = whole[number % 2]
        height, width = random.integers(200, 420, 2)
        top, left = random.integers(0, 427 - height), random.integers(0, 640 - width)
        part = image.crop((left, top, left + width, top + height))
        factor = side / 310
        part = part.resize((round(width * factor), round(height * factor)))
        names.append(f"{number}.{suffix}")
        part.save(folder / names[-1])
    return names


def plain(folder: Path, names: list[str], shape: ImageShape) -> None:
    """Decode and resize one file after another."""
    for name in names:
        with Image.open(folder / name) as image:
            np.asarray(image.convert("RGB").resize((shape.width, shape.height)))


def main() -> None:
    """Print images per second of both, medians over the rounds, and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--side", type=int, default=500, help="pixels of a side, about")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{given.images} images of about {given.side} pixels a side, {cores} cores")
    for suffix in ("jpg", "png"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            files = photographs(folder, given.images, suffix, given.side)
            shape = common_shape(ImageFiles(folder, files))
            pack(ImageFiles(folder, files), folder / "packed")
            packed = ImageRows(PackedImages(folder / "packed"), shape)
            taken: dict[str, list[tuple[float, float]]] = {"loop": [], "batches": []}
            for number in range(given.rounds):
                order = np.random.default_rng(number).permutation(given.images)
                parts = np.split(order, range(given.batch, given.images, given.batch))
                with measured(taken["loop"]):
                    plain(folder, [files[row] for row in order], shape)
                with measured(taken["batches"]):
                    for batch in parts:
                        packed.take(batch)
        print(f"  {suffix}, to {shape.height} × {shape.width} pixels")
        for way, found in taken.items():
            wall, cpu = (statistics.median(one) for one in zip(*found, strict=True))
            ratios = [one[0] / two[0] for one, two in zip(taken["loop"], found, strict=True)]
            print(
                f"    {way:8} {given.images / wall:6.0f} images/s   "
                f"{statistics.median(ratios):.2f} × the loop "
                f"({min(ratios):.2f} to {max(ratios):.2f})   "
                f"CPU time {1e3 * cpu / given.images:.1f} ms an image"
            )


@contextmanager
def measured(into: list[tuple[float, float]]) -> Iterator[None]:
    """Append the wall time and this process's CPU time of a block."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    into.append((time.perf_counter() - wall, time.process_time() - cpu))


if __name__ == "__main__":
    main()
