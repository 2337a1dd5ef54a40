"""Random changes of training images: mirrored left to right, shifted by up to an eighth.

What happens to an image is a function of the job's seed, the epoch and the image's row alone. So
it is the same for every batch size, split among ranks, order of loading and resumed run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Augmentation = Literal["none", "flip", "crop", "flip-crop"]

PADDING = 8
"""An image is padded by a side's length / 8 before a part of its own size is cut out."""


def augmented(images: Array, rows: Array, kind: Augmentation, seed: int, epoch: int) -> Array:
    """The images (n, channels, height, width) as training sees them in this epoch.

    `rows` are the images' row numbers (n). `flip` mirrors every second image on average; `crop`
    pads an image with zeros and cuts out a part of the old size at a random place.
    """
    import numpy as np

    if kind == "none" or not len(images):
        return images
    draws = _draws(seed, epoch, rows)
    if kind in ("crop", "flip-crop"):
        images = _cropped(images, draws >> np.uint64(1))
    if kind in ("flip", "flip-crop"):
        mirrored = np.flatnonzero(draws & np.uint64(1))
        images = images.copy() if kind == "flip" else images
        images[mirrored] = images[mirrored][..., ::-1]
    return images


def _cropped(images: Array, draws: Array) -> Array:
    import numpy as np

    number, channels, height, width = images.shape
    top, left = -(-height // PADDING), -(-width // PADDING)
    wide = np.zeros((number, channels, height + 2 * top, width + 2 * left), images.dtype)
    wide[:, :, top : top + height, left : left + width] = images
    # 31 bits each, whose remainders are uniform to 1 part in 10 million.
    bits = np.uint64(2**31 - 1)
    y = (draws & bits) % np.uint64(2 * top + 1)
    x = (draws >> np.uint64(31) & bits) % np.uint64(2 * left + 1)
    parts = np.lib.stride_tricks.sliding_window_view(wide, (height, width), axis=(2, 3))
    return parts[np.arange(number), :, y.astype(np.int64), x.astype(np.int64)]


def _draws(seed: int, epoch: int, rows: Array) -> Array:
    """64 random bits for each row: SplitMix64 (Steele et al. 2014), seeded by seed and epoch."""
    import numpy as np

    state = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]
    bits = state + (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))
