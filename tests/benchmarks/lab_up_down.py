"""The time to create and remove a lab of hosts.

    python tests/benchmarks/lab_up_down.py [ROUNDS] [--hosts 3]

Each round (default 7) creates a lab whose hosts have a quota and a limited link (`tests/lab.py`;
needs root), waits until every sshd accepts connections, and removes it. Prints median and range of
creation, of removal and of both (target: about a second), and the remains of all labs: namespaces,
links, cgroups, folders, processes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import lab


def traces(tag: str) -> list[str]:
    """The namespaces, links, cgroups and folders of a lab with this tag."""
    places = (
        "/run/netns/{}n*",
        "/sys/class/net/{}*",
        "/sys/fs/cgroup/cpu/{}n*",
        "/sys/fs/cgroup/{}n*",
    )
    found = [
        str(path) for place in places for path in Path("/").glob(place.format(tag).lstrip("/"))
    ]
    folder = Path("/run/trainwright-lab") / tag
    return found + [str(folder)] * folder.exists()


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie, which only its parent has yet to reap, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> None:
    """Measure, and print three lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=7)
    parser.add_argument("--hosts", type=int, default=3)
    asked = parser.parse_args()
    if (reason := lab.why_not()) is not None:
        raise SystemExit(reason)
    found: dict[str, list[float]] = {"up": [], "down": [], "up and down": []}
    left: list[str] = []
    for _ in range(asked.rounds):
        began = time.perf_counter()
        with lab.running(cores=[0.5] * asked.hosts, rate="1gbit") as made:
            up = time.perf_counter()
            pids = [pid for host in made.hosts for pid in host.pids()]
            assert traces(made.tag), "a running lab must leave traces"
            looked = time.perf_counter()
        ended = time.perf_counter()
        for name, value in (
            ("up", up - began),
            ("down", ended - looked),
            ("up and down", up - began + ended - looked),
        ):
            found[name].append(value)
        left += traces(made.tag) + [f"process {pid}" for pid in pids if alive(pid)]
    for name, values in found.items():
        print(
            f"{asked.hosts} hosts, {name}: median {statistics.median(values):.2f} s, "
            f"{min(values):.2f} to {max(values):.2f} s of {len(values)}"
        )
    print(f"left behind: {', '.join(left) or 'nothing'}")


if __name__ == "__main__":
    main()
