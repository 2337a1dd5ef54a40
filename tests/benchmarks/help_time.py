"""The time of `trainwright --help`, beside that of an interpreter that does nothing.

    python tests/benchmarks/help_time.py

Rounds alternate between the command and the bare interpreter, each in a new process.
"""

from __future__ import annotations

import argparse
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


def seconds(command: list[str]) -> float:
    """The wall time of a command, which must succeed."""
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> None:
    """Print median and spread of both, and whether the bar is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    for command in COMMANDS.values():  # fills the caches of files and byte code
        seconds(command)
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            taken[name].append(seconds(command))
    print(f"{rounds} alternating rounds of new processes")
    for name, found in taken.items():
        print(
            f"  {name:20} median {statistics.median(found):.3f} s   "
            f"min {min(found):.3f}   max {max(found):.3f}"
        )
    met = statistics.median(taken["trainwright --help"]) <= BAR_S
    print(f"  at most {BAR_S:g} s: {'met' if met else 'missed'}")


if __name__ == "__main__":
    main()
