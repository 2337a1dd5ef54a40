"""The safe bound against the resident memory of real processes: `python tests/benchmarks/estimator/safe.py [--cases N] [--fit]`.

Each case trains in a process of its own (`resident.py`). Batch sizes are drawn so that live bytes reach from 10 MB to --most.
`memory.py` ends with the same table of fewer cases. With --fit the networks that calibration trains are measured, and the
constants of `estimator.memory` are fitted to them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from resident import case_of

from trainwright.estimator.accuracy import percent, table
from trainwright.estimator.memory import held_bytes, safe_bytes
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
    held_bytes: float

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
    command = [sys.executable, str(_RESIDENT), which, str(seed), str(number), str(batch_size)]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    expected = structure.peak_bytes(batch_size)
    safe = safe_bytes(structure, batch_size, expected)
    held = held_bytes(structure, structure.lifetimes, batch_size) if structure.lifetimes else 0.0
    return Seen(f"{case.label} at b{batch_size}", done["high_bytes"], expected, safe, max(expected, held))


def fit(seen: list[Seen], quantile: float) -> list[float]:
    """Quantile regression of what was measured on (1, held), neither negative; errors relative."""
    from scipy.optimize import linprog

    terms = np.array([[1.0, one.held_bytes / 2**20] for one in seen])
    high = np.array([one.high_bytes for one in seen]) / 2**20
    weight, count = 1 / high, len(seen)
    costs = np.concatenate([np.zeros(2), quantile * weight, (1 - quantile) * weight])
    equal = np.hstack([terms, np.eye(count), -np.eye(count)])
    found = linprog(costs, A_eq=equal, b_eq=high, bounds=[(0, None)] * len(costs), method="highs")
    return [float(one) for one in found.x[:2]]


def report(seen: list[Seen]) -> str:
    """Cases, the share that held more than the bound, and the headroom."""
    headroom = np.array([one.headroom for one in seen])
    rows = [("safe", "cases", "under", "median", "p10", "p90")]
    figures = [float(np.mean(headroom < 0)), *(float(np.quantile(headroom, place)) for place in (0.5, 0.1, 0.9))]
    rows += [("headroom", str(len(seen)), percent(figures[0]), *(percent(one, signed=True) for one in figures[1:]))]
    return table(rows)


def compare(count: int, seed: int, most: float, which: str = "zoo") -> list[Seen]:
    """Measure this many cases, printing each."""
    seen: list[Seen] = []
    number = 0
    while len(seen) < count:
        one = measure(which, seed, number, most)
        number += 1
        if one is not None:
            seen.append(one)
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
    given = parser.parse_args()
    print("case, expected, safe, measured")
    seen = compare(given.cases, given.seed, given.most, "networks" if given.fit else "zoo")
    print("\n" + report(seen))
    if given.fit:
        fixed, held = fit(seen, given.quantile)
        print(f"\nfixed {fixed:.3f} MiB, of what the heap's model holds {held:.3f}")


if __name__ == "__main__":
    main()
