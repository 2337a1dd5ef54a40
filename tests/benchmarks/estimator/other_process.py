"""Times the same cases in another process, while this one waits.

Memory addresses differ between processes, and so do step times; no prediction can know that. The
other process is new, while the benchmark's own has traced and predicted: the difference includes
that too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import device
import torch
from step_time_report import HELD_OUT, IN_FAMILY
from timing import time_steps
from zoo import LIKE_CALIBRATED, Case, cases


def drawn(seed: int, held_out: int, in_family: int) -> list[tuple[str, Case]]:
    """Cases with their group; deterministic in the arguments."""
    made = [
        (IN_FAMILY if one.family in LIKE_CALIBRATED else HELD_OUT, one)
        for one in cases(seed, held_out)
    ]
    return made + [(IN_FAMILY, one) for one in device.in_family_cases(in_family, seed)]


class OtherProcess:
    """A context with the steps of `drawn` in a separate process, ready when it begins."""

    def __init__(self, threads: int, seed: int, held_out: int, in_family: int) -> None:
        words = [sys.executable, __file__, *map(str, (threads, seed, held_out, in_family))]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> OtherProcess:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __call__(self, number: int) -> tuple[float, float]:
        """Wall-clock and CPU seconds of the step of a case, as `timing.time_steps` finds them."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        wall_s, cpu_s = self._answer()
        return wall_s, cpu_s

    def _answer(self) -> list[float]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the second process ended with {self._process.wait()}")
        return list(json.loads(line))


def main(words: Sequence[str]) -> None:
    """Report ready, then time the steps whose numbers arrive on stdin, until it ends."""
    threads, seed, held_out, in_family = map(int, words)
    torch.set_num_threads(threads)
    steps = [case.step() for _, case in drawn(seed, held_out, in_family)]
    print("[]", flush=True)
    for line in sys.stdin:
        print(json.dumps(time_steps(steps[int(line)])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
