"""The safe bound against the resident memory of real processes: `python tests/benchmarks/estimator/safe.py [--cases N] [--fit]`.

Each case trains in a process of its own (`resident.py`). Batch sizes are drawn so that live bytes reach from 10 MB to --most.
`memory.py` ends with the same table of fewer cases. With --file each case is kept as it comes, and a later call goes on from
there. With --fit the networks that calibration trains are measured, and the constants of `estimator.memory` are fitted to them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from resident import case_of

from trainwright.estimator.accuracy import percent, table
from trainwright.estimator.memory import resident_terms, safe_bytes
from trainwright.estimator.trace import trace

_LEAST_BYTES, MOST_BYTES = 1e7, 5e8
_RESIDENT = Path(__file__).with_name("resident.py")


@dataclass(frozen=True)
class Seen:
    """One case: what its process held at most above its baseline, and what was predicted."""

    label: str
    high_bytes: float
    expected_bytes: float
    safe_bytes: float
    terms: tuple[float, ...]
    number: int

    @property
    def headroom(self) -> float:
        """safe / measured - 1."""
        return self.safe_bytes / self.high_bytes - 1


def measure(which: str, seed: int, number: int, most: float) -> Seen | None:
    """The case of this number at a batch size of its own; None where it is too large at its least."""
    case = case_of(which, seed, number)
    structure = trace(case.spec(), case.batch_size)
    draw = random.Random(f"{which} {seed} {number}")
    target, batch_size = _LEAST_BYTES * (most / _LEAST_BYTES) ** draw.random(), 1
    while batch_size < 4096 and structure.peak_bytes(2 * batch_size) <= target:
        batch_size *= 2
    if structure.peak_bytes(batch_size) > most:
        return None
    structure = trace(case.spec(), batch_size)  # as `estimate --batch-size` does
    command = [sys.executable, str(_RESIDENT), which, str(seed), str(number), str(batch_size)]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    expected, safe = structure.peak_bytes(batch_size), safe_bytes(structure, batch_size)
    terms = resident_terms(structure, batch_size, expected)
    return Seen(f"{case.label} at b{batch_size}", done["high_bytes"], expected, safe, terms, number)


def fit(seen: list[Seen], quantile: float) -> list[float]:
    """Quantile regression of what remains after code on (placed, spread, heap), none negative; errors are relative."""
    from scipy.optimize import linprog

    terms = np.array([one.terms[1:] for one in seen]) / 2**20
    excess = np.array([one.high_bytes - one.expected_bytes - one.terms[0] for one in seen]) / 2**20
    weight, count = 2**20 / np.array([one.high_bytes for one in seen]), len(seen)
    shares = terms.shape[1]
    costs = np.concatenate([np.zeros(shares), quantile * weight, (1 - quantile) * weight])
    equal = np.hstack([terms, np.eye(count), -np.eye(count)])
    found = linprog(costs, A_eq=equal, b_eq=excess, bounds=[(0, None)] * len(costs), method="highs")
    return [float(one) for one in found.x[:shares]]


def trade(seen: list[Seen]) -> str:
    """What is under, and at which headroom, were the excess over the expected multiplied by a factor."""
    rows = [("excess times", "under", "median headroom")]
    for factor in (0.4, 0.6, 0.8, 1.0, 1.2, 1.4):
        bounds = [one.expected_bytes + factor * (one.safe_bytes - one.expected_bytes) for one in seen]
        headroom = np.array([bound / one.high_bytes - 1 for bound, one in zip(bounds, seen, strict=True)])
        rows.append(
            (f"{factor:.1f}", percent(float(np.mean(headroom < 0))), percent(float(np.median(headroom)), signed=True))
        )
    return table(rows)


def report(seen: list[Seen]) -> str:
    """Cases, the share that held more than the bound, and the headroom."""
    headroom = np.array([one.headroom for one in seen])
    rows = [("safe", "cases", "under", "median", "p10", "p90")]
    figures = [float(np.mean(headroom < 0)), *(float(np.quantile(headroom, place)) for place in (0.5, 0.1, 0.9))]
    rows += [("headroom", str(len(seen)), percent(figures[0]), *(percent(one, signed=True) for one in figures[1:]))]
    return table(rows)


def earlier(file: Path | None) -> list[Seen]:
    """The cases that a file holds; none where there is no file yet."""
    if file is None or not file.exists():
        return []
    read = [json.loads(line) for line in file.read_text().splitlines()]
    return [Seen(**{**one, "terms": tuple(one["terms"])}) for one in read]


def compare(count: int, seed: int, most: float, which: str = "zoo", file: Path | None = None) -> list[Seen]:
    """Measure until there are this many cases, printing each; those of the file are among them, and it grows."""
    seen = earlier(file)
    number = max((one.number for one in seen), default=-1) + 1
    while len(seen) < count:
        one = measure(which, seed, number, most)
        number += 1
        if one is not None:
            seen.append(one)
            if file is not None:
                with file.open("a") as out:
                    out.write(json.dumps(asdict(one)) + "\n")
            mib = f"{one.expected_bytes / 2**20:8.1f} {one.safe_bytes / 2**20:8.1f} {one.high_bytes / 2**20:8.1f} MiB"
            print(f"{one.label:64} {mib}  {percent(one.headroom, signed=True)}", flush=True)
    return seen


def main() -> None:
    """Measure and compare; fit where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=float, default=MOST_BYTES, help="bytes")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--quantile", type=float, default=0.99)
    parser.add_argument("--file", type=Path, help="cases, one a line: of this seed, --most and --fit only")
    given = parser.parse_args()
    print("case, expected, safe, measured")
    seen = compare(given.cases, given.seed, given.most, "networks" if given.fit else "zoo", given.file)
    print("\n" + report(seen) + "\n\n" + trade(seen))
    if given.fit:
        placed, spread, heap = fit(seen, given.quantile)
        print(f"\nof what is placed {placed:.3f}, of the spread {spread:.3f}, of the heap {heap:.3f}")


if __name__ == "__main__":
    main()
