"""The safe bound against the resident memory of real processes: `… safe.py [--cases N] …`.

Each case trains in a separate process (`resident.py`), at a batch size whose live bytes are between
10 MB and --most. `memory.py` ends with the same table of fewer cases. The constants of
`estimator.memory` are fitted to six steps of calibration's networks, and to no case of the zoo. A
long session can be split (300 cases take 30 minutes):

    for seed in 1 2; do safe.py --cases 150 --seed $seed --out cases.jsonl; done
    safe.py --report cases.jsonl
    safe.py --networks 200 --fit
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accuracy import percent, table
from resident import MORE_STEPS, STEPS, case_of
from scipy.optimize import linprog, nnls
from zoo import Case

from trainwright.estimator.measure.networks.single_layers import SINGLES
from trainwright.estimator.memory.step_memory import (
    block_bytes,
    code_bytes,
    peak_bytes,
    prepared,
    safe_bytes,
)
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.trace import trace

_LEAST_BYTES, MOST_BYTES = 1e7, 5e8
_MOST_BATCH = 4096
_FORKS = 10
_QUANTILE = 0.99
_LEAST_BLOCKS = 100
"""Minimum number of blocks in a case for the fit: with fewer, a single block matters too much."""
_RESIDENT = Path(__file__).with_name("resident.py")


@dataclass(frozen=True)
class Seen:
    """One case: the peak of its process above the baseline after some and after more steps, and
    the predictions.
    """

    label: str
    high_bytes: float
    later_high_bytes: float
    expected_bytes: float
    safe_bytes: float
    code_bytes: float
    held_bytes: float
    block_bytes: float
    blocks: int
    file_bytes: float
    lasting_bytes: float
    prepared: tuple[int, int]
    kinds: list[str]

    @property
    def headroom(self) -> float:
        """safe / measured - 1."""
        return self.safe_bytes / self.high_bytes - 1


class Processes:
    """Trains each case in a separate process, forked from one that is replaced after some cases.

    A new process has other addresses.
    """

    def __init__(self) -> None:
        self._left, self._parent = 0, None

    def measure(
        self, which: str, seed: int, number: int, batch_size: int, process: str = "plain"
    ) -> dict[str, int]:
        """The result of `resident` for the case; `process` is plain, or like a rank's."""
        if self._parent is None or not self._left:
            self.close()
            self._parent = subprocess.Popen(
                [sys.executable, str(_RESIDENT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._left = _FORKS
        self._left -= 1
        assert self._parent.stdin
        assert self._parent.stdout
        print(which, seed, number, batch_size, process, file=self._parent.stdin, flush=True)
        line = self._parent.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{which} {seed} {number} at batch size {batch_size}: its process failed"
            )
        found: dict[str, int] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process from which the others are forked."""
        if self._parent is not None:
            self._parent.communicate()
            self._parent = None


def draw(which: str, seed: int, number: int, most: float) -> tuple[Case, Structure, int] | None:
    """The case with this number, its structure and a batch size.

    None if it is too large or a single layer.
    """
    case = case_of(which, seed, number)
    if case.family in SINGLES:
        return None  # a single layer is an operation rather than a step
    structure = trace(case.spec(), case.batch_size)
    drawn = random.Random(f"{which} {seed} {number}")
    target, batch_size = _LEAST_BYTES * (most / _LEAST_BYTES) ** drawn.random(), 1
    while batch_size < _MOST_BATCH and peak_bytes(structure, 2 * batch_size) <= target:
        batch_size *= 2
    return (case, structure, batch_size) if peak_bytes(structure, batch_size) <= most else None


def fit(seen: Sequence[Seen], quantile: float = _QUANTILE) -> Any:
    """Quantile regression of resident bytes on (code, held, largest block), with relative errors.

    The shares are at least 1, 0 and 0.
    """
    count = len(seen)
    terms = np.array([[one.code_bytes, one.held_bytes, one.block_bytes] for one in seen])
    terms /= np.array([[one.later_high_bytes] for one in seen])
    costs = [0.0, 0.0, 0.0, *[quantile] * count, *[1 - quantile] * count]
    equal = np.hstack([terms, np.eye(count), -np.eye(count)])
    bounds = [(1, None), *[(0, None)] * (len(costs) - 1)]
    return linprog(costs, A_eq=equal, b_eq=np.ones(count), bounds=bounds, method="highs").x[:3]


def fit_code(seen: Sequence[Seen]) -> dict[str, float]:
    """Non-negative least squares of resident file pages, in MiB, on kinds of operations.

    "" is for all kinds.
    """
    kinds = ["", *sorted({one for each in seen for one in each.kinds})]
    terms = np.array([[float(not kind or kind in one.kinds) for kind in kinds] for one in seen])
    found, _ = nnls(terms, np.array([one.file_bytes / 2**20 for one in seen]))
    return {
        kind: round(float(size), 1) for kind, size in zip(kinds, found, strict=True) if size >= 0.05
    }


def fit_lasting(seen: Sequence[Seen]) -> list[float]:
    """Non-negative least squares of the heap's other contents than tensors, in MiB.

    For all, for a convolution, and for a product.
    """
    found, _ = nnls(
        np.array([[1.0, *one.prepared] for one in seen]),
        np.array([one.lasting_bytes / 2**20 for one in seen]),
    )
    return [round(float(size), 3) for size in found]


def report(seen: Sequence[Seen]) -> str:
    """The number of cases, the share above the bound, and the headroom."""
    rows = [("safe", "cases", "under", "median", "p10", "p90")]
    for steps, headroom in (
        (STEPS, np.array([one.headroom for one in seen])),
        (MORE_STEPS, np.array([one.safe_bytes / one.later_high_bytes - 1 for one in seen])),
    ):
        figures = [
            float(np.mean(headroom < 0)),
            *(float(np.quantile(headroom, place)) for place in (0.5, 0.1, 0.9)),
        ]
        shown = [percent(figures[0]), *(percent(one, signed=True) for one in figures[1:])]
        rows += [(f"headroom after {steps} steps", str(len(seen)), *shown)]
    return table(rows)


def compare(
    count: int,
    seed: int,
    most: float,
    which: str = "zoo",
    out: Path | None = None,
    process: str = "plain",
) -> list[Seen]:
    """Measure this many cases. Prints each, and appends it to a file at once."""
    seen: list[Seen] = []
    processes = Processes()
    for number in itertools.count():
        if len(seen) == count:
            break
        drawn = draw(which, seed, number, most)
        if drawn is None:
            continue
        case, structure, batch_size = drawn
        measured = processes.measure(which, seed, number, batch_size, process)
        high = measured["high_bytes"]
        expected = peak_bytes(structure, batch_size)
        safe = safe_bytes(structure, batch_size, expected)
        held, blocks = 0.0, 0
        if structure.lifetimes is not None and structure.most_held_bytes is not None:
            held = max(expected, structure.most_held_bytes(batch_size))
            blocks = int((structure.lifetimes.events()[2] >= 0).sum())
        one = Seen(
            f"{case.label} at b{batch_size}",
            high,
            measured["later_high_bytes"],
            expected,
            safe,
            code_bytes(structure),
            held,
            block_bytes(structure, batch_size),
            blocks,
            measured["file_bytes"],
            measured["in_use_bytes"] - structure.idle_bytes(batch_size),
            prepared(structure),
            sorted({one.kind for one in structure.trace}),
        )
        seen.append(one)
        if out is not None:
            with out.open("a") as file:
                file.write(f"{json.dumps(asdict(one))}\n")
        figures = (one.expected_bytes, one.safe_bytes, one.high_bytes)
        mib = " ".join(f"{size / 2**20:8.1f}" for size in figures) + " MiB"
        print(f"{one.label:64} {mib}  {percent(one.headroom, signed=True)}", flush=True)
    processes.close()
    return seen


def main() -> None:
    """Measure and compare, or compare earlier measurements; fit if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300, help="number of cases of the zoo")
    parser.add_argument(
        "--networks",
        type=int,
        default=0,
        help="number of calibration's networks to use in place of the zoo",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--most", type=float, default=MOST_BYTES, help="maximum live bytes of a case"
    )
    parser.add_argument(
        "--process",
        choices=("plain", "rank"),
        default="plain",
        help="treat memory like our ranks, or not",
    )
    parser.add_argument(
        "--out", type=Path, help="append the cases to this file, one line of JSON each"
    )
    parser.add_argument(
        "--report", type=Path, help="measure nothing: report the cases in this file"
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants of estimator.memory")
    given = parser.parse_args()
    if given.report:
        seen = [Seen(**json.loads(line)) for line in given.report.read_text().splitlines()]
    else:
        print("case, expected, safe, measured")
        which = "networks" if given.networks else "zoo"
        seen = compare(
            given.networks or given.cases, given.seed, given.most, which, given.out, given.process
        )
    print("\n" + report(seen))
    if given.fit:
        deep = [one for one in seen if one.held_bytes and one.blocks >= _LEAST_BLOCKS]
        code, held, block = fit(deep)
        print(
            f"\n{len(deep)} of them: {code:.2f} of the code, {held:.2f} of what is held, "
            f"{block:.2f} of the largest block"
        )
        print("code in MiB, by kinds:", fit_code(deep))
        print("what lasts in MiB, of all, a convolution, a product:", fit_lasting(seen))


if __name__ == "__main__":
    main()
