"""The time of `trainwright --help`, beside that of an interpreter that does nothing.

    python tests/benchmarks/help_time.py

Rounds alternate between the command and the bare interpreter, each in a new process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

ROUNDS, BAR_S = 15, 0.5
COMMANDS = {
    "trainwright --help": [
        sys.executable,
        "-c",
        "import sys; from trainwright.tasks.cli.main import main; "
        "sys.argv = ['trainwright', '--help']; main()",
    ],
    "bare interpreter": [sys.executable, "-c", "pass"],
}


def seconds(command: list[str]) -> tuple[float, float]:
    """The wall time and the CPU time of a command, which must succeed."""
    started, before = time.perf_counter(), os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    taken, after = time.perf_counter() - started, os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])  # of child processes
    return taken, cpu_s


def main() -> None:
    """Print median and spread of both, and whether the bar is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    for command in COMMANDS.values():  # fills the caches of files and byte code
        seconds(command)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            taken[name].append(seconds(command))
    print(f"{rounds} alternating rounds of new processes")
    for name, found in taken.items():
        wall, cpu = zip(*found, strict=True)
        print(
            f"  {name:20} median {statistics.median(wall):.3f} s   min {min(wall):.3f}   "
            f"max {max(wall):.3f}   CPU time {statistics.median(cpu):.3f} s"
        )
    median = statistics.median(one for one, _ in taken["trainwright --help"])
    print(f"  at most {BAR_S:g} s: {'met' if median <= BAR_S else 'missed'}")


if __name__ == "__main__":
    main()
