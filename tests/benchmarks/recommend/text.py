"""The templates for texts against TF-IDF with logistic regression, on the same splits.

    python tests/benchmarks/recommend/text.py
    python tests/benchmarks/recommend/text.py --inner    # while developing: no held-out row is used

A fifth of the rows is held out, by seed. With --inner, a fifth of the other rows takes their place.
The baseline has scikit-learn's defaults; beside it, C = 10. Data: see package_data.py.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import numpy as np
import torch
from package_data import bbc_news, phone_tweets, rated
from plain_training import accuracy, schema_of, split, trained
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from trainwright.tasks.data.modalities.tokens import Tokenizer, padded, text_length, token_counts
from trainwright.tasks.recommend.templates import templates

SETS = {
    "tweets": phone_tweets,
    "bbc": bbc_news,
    "movie": partial(rated, "movie"),
    "nyt": partial(rated, "nyt"),
    "rated-tweets": partial(rated, "tweets"),
    "amazon": partial(rated, "amazon"),
}
TESTED = ("amazon", "rated-tweets")
"""Nothing was chosen by them."""
BAR = -0.5


def main() -> None:
    """Print each template's accuracy by set and size, and the difference from the baseline."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--inner", action="store_true", help="measure on training rows")
    parser.add_argument("--seeds", type=int, default=5, help="number of splits; default 5")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "large"])
    parser.add_argument("--templates", nargs="+", default=["ngram-bag", "text-convolution"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.sets:
        measure(name, asked)


def measure(name: str, asked: argparse.Namespace) -> None:
    """One set of texts."""
    texts, labels = SETS[name]()
    classes = int(labels.max()) + 1
    tokens = tokens_of(texts, torch.arange(len(texts)))
    targets = torch.from_numpy(labels)
    parts = []
    for seed in range(asked.seeds):
        rows, held = split(len(texts), seed)
        if asked.inner:
            first, second = split(len(rows), 1000 + seed)
            rows, held = rows[first], rows[second]
        parts.append((rows, held))
    print(f"{name}: {len(texts)} texts, {classes} classes, {tokens.shape[1]} tokens")
    baselines = {c: [baseline(texts, labels, *one, c) for one in parts] for c in (1.0, 10.0)}
    for c, found in baselines.items():
        print(f"  TF-IDF, logistic regression, C = {c:g}: {_shown(found)}", flush=True)
    best = baselines[1.0]
    for template in asked.templates:
        for size in asked.sizes:
            found, started = [], time.process_time()
            for seed, (rows, held) in enumerate(parts):
                schema = schema_of("text-classification", tokens[rows], classes=classes)
                model, _ = trained(
                    templates()[template], size, schema, tokens[rows], targets[rows], seed
                )
                found.append(accuracy(model, tokens[held], targets[held]))
            spent = (time.process_time() - started) / len(parts)
            points = 100 * (np.mean(found) - np.mean(best))
            verdict = "met" if points >= BAR else "missed"
            print(
                f"  {template} {size}: {_shown(found)}; {points:+.2f} points "
                f"(bar {BAR}: {verdict}); {spent:.0f} s of CPU a fit",
                flush=True,
            )


def tokens_of(texts: list[str], rows: torch.Tensor) -> torch.Tensor:
    """All texts as tokens, in the length that these rows have."""
    flat, counts = Tokenizer()(texts)
    length = text_length(token_counts([texts[row] for row in rows]))
    return torch.from_numpy(padded(flat, counts, length).astype(np.int64))


def baseline(
    texts: list[str], labels: np.ndarray, rows: torch.Tensor, held: torch.Tensor, c: float
) -> float:
    vectorizer = TfidfVectorizer()
    model = LogisticRegression(max_iter=1000, C=c)
    model.fit(vectorizer.fit_transform([texts[one] for one in rows]), labels[rows])
    return float(model.score(vectorizer.transform([texts[one] for one in held]), labels[held]))


def _shown(found: list[float]) -> str:
    each = " ".join(f"{one:.4f}" for one in found)
    return f"{np.mean(found):.4f} (sd {np.std(found):.4f}: {each})"


if __name__ == "__main__":
    main()
