"""Drift: false alarms between random halves of a table, and how often known changes are found.

    python tests/benchmarks/validate/drift.py [--rows N …] [--rounds N]

Each round makes a table with eight columns and compares one half with the other: an alarm of any
column is false. Then it compares tables of as many rows with changed ones: one change at a time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from trainwright.tasks.runs.artefacts.data_profile import DataProfile
from trainwright.tasks.validate.drift.compare_profiles import compare
from trainwright.tasks.validate.drift.profile import BATCH_ROWS, profile
from trainwright.tasks.validate.drift.random_halves import with_noise

BAR = 0.01
SHARES = np.array([0.02, 0.08, 0.15, 0.25, 0.5])
Columns = dict[str, Any]


def make_columns(random: np.random.Generator, rows: int) -> Columns:
    """Numbers of several distributions, categories, nulls, and a target with five classes."""
    return {
        "normal": random.normal(5, 2, rows),
        "exponential": random.exponential(3, rows),
        "two peaks": np.where(random.random(rows) < 0.4, -2, 2) + random.normal(size=rows),
        "small whole": random.integers(0, 12, rows),
        "rare flag": random.random(rows) < 0.02,
        "category": random.choice(list("abcde"), rows, p=SHARES),
        "with nulls": pa.array(random.normal(size=rows), mask=random.random(rows) < 0.05),
        "label": random.choice(5, rows, p=SHARES),
    }


def profiled(columns: Columns) -> DataProfile:
    """The profile of a table."""
    batches = pa.table(columns).to_batches(max_chunksize=BATCH_ROWS)
    return profile(batches, "label", classes=True)


def shifted(columns: Columns, random: np.random.Generator) -> Columns:
    """`normal` shifted by 0.1 standard deviations."""
    return columns | {"normal": columns["normal"] + 0.2}


def stretched(columns: Columns, random: np.random.Generator) -> Columns:
    """`exponential` shifted by 0.1 standard deviations."""
    return columns | {"exponential": columns["exponential"] + 0.3}


def with_more_nulls(columns: Columns, random: np.random.Generator) -> Columns:
    """`with nulls`: two points more."""
    rows = len(columns["label"])
    values = random.normal(size=rows)
    return columns | {"with nulls": pa.array(values, mask=random.random(rows) < 0.07)}


def with_new_category(columns: Columns, random: np.random.Generator) -> Columns:
    """`category`: one row in a hundred has a new one."""
    values = columns["category"].copy()
    values[random.random(len(values)) < 0.01] = "new"
    return columns | {"category": values}


def with_doubled_class(columns: Columns, random: np.random.Generator) -> Columns:
    """`label`: 4 % instead of 2 % have the rarest class."""
    shares = SHARES + np.array([0.02, 0, 0, 0, -0.02])
    return columns | {"label": random.choice(5, len(columns["label"]), p=shares)}


CHANGES: dict[str, tuple[str, Callable[[Columns, np.random.Generator], Columns]]] = {
    "shift of 0.1 sd, normal": ("normal", shifted),
    "shift of 0.1 sd, exponential": ("exponential", stretched),
    "+2 points of nulls": ("with nulls", with_more_nulls),
    "a new category, 1 %": ("category", with_new_category),
    "a doubled class share, 2 to 4 %": ("label", with_doubled_class),
}


def drifted(now: DataProfile, reference: DataProfile) -> set[str]:
    """The columns that drifted."""
    return {one.column for one in compare(now, reference) if one.drifted}


def false_alarms(rows: int, rounds: int) -> int:
    """In how many rounds some column of one half differs from the other half's."""
    count = 0
    for seed in range(rounds):
        random = np.random.default_rng([rows, seed])
        table = pa.table(make_columns(random, rows))
        order = random.permutation(rows)
        halves = [table.take(pa.array(one)) for one in np.array_split(order, 2)]
        one, two = (
            profile(half.to_batches(max_chunksize=BATCH_ROWS), "label", classes=True)
            for half in halves
        )
        count += bool(drifted(one, with_noise(two)))
    return count


def found(rows: int, rounds: int) -> dict[str, int]:
    """In how many rounds each change is found, in its own column."""
    counts = dict.fromkeys(CHANGES, 0)
    for seed in range(rounds):
        random = np.random.default_rng([rows, seed, 1])
        reference = with_noise(profiled(make_columns(random, rows)))
        for name, (column, change) in CHANGES.items():
            later = profiled(change(make_columns(random, rows), random))
            counts[name] += column in drifted(later, reference)
    return counts


def main() -> None:
    """Print the shares, with the 95 % bound of the false alarms."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[200, 2_000, 20_000, 200_000])
    parser.add_argument("--rounds", type=int, default=200, help="of halves; a tenth of changes")
    options = parser.parse_args()
    total = alarms = 0
    for rows in options.rows:
        rounds = max(10, min(options.rounds, 20_000_000 // rows))
        count = false_alarms(rows, rounds)
        total, alarms = total + rounds, alarms + count
        tries = max(5, rounds // 10)
        shares = ", ".join(f"{name} {n}/{tries}" for name, n in found(rows, tries).items())
        print(
            f"{rows:,} rows: false alarms {count} of {rounds} halves; found: {shares}", flush=True
        )
    noise = 1.96 * math.sqrt(max(1, alarms)) / total
    met = "met" if alarms / total <= BAR else "missed"
    print(
        f"false alarms {100 * alarms / total:.2f} % ± {100 * noise:.2f}; bar {BAR:.0%}: {met}",
        flush=True,
    )


if __name__ == "__main__":
    main()
