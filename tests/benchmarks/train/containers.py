"""How exactly containers on hosts hold their limits, and how fast training goes on without one.

    python tests/benchmarks/train/containers.py [ROUNDS]

On hosts of a lab, by podman with this machine's root file system (needs root). ROUNDS (default 5)
times each: the CPUs that a busy process gets, beside its `cpus`; the memory that a process has
touched when it is killed, beside its `memory` (its Python is a part of it); the seconds from a
killed container until two more steps are finished, with the longest pause in the second before.
If other work runs, give the group above podman's containers more weight first (cpu.shares of
/sys/fs/cgroup/cpu/libpod_parent): theirs counts within it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

import lab
from container_case import busy_cores, contain, kill_container, touched_bytes
from hosts_case import SLOW, on_hosts
from recovery import Watch, wait_for

from trainwright.tasks import progress
from trainwright.tasks.train import train

CPUS, MEMORY = (0.1, 0.5), 512 * 2**20
EPOCHS = 12


def report(what: str, values: list[float], bar: str, met: bool) -> None:
    median, low, high = statistics.median(values), min(values), max(values)
    print(
        f"{what}: median {median:.3f}, {low:.3f} to {high:.3f} ({len(values)}); bar {bar}: "
        f"{'met' if met else 'MISSED'}",
        flush=True,
    )


def recovery_s(made: lab.Lab) -> tuple[float, float]:
    """The seconds until two more steps after a killed container, and the longest pause before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watch, found = Watch(folder), []
        asked = on_hosts(folder, made, [40, 20], SLOW, backend="torch", epochs=EPOCHS)
        contain(asked, {"image": "/:O"})

        def kill() -> None:
            wait_for(lambda: watch.step >= 20, watch)
            now, step = time.monotonic(), watch.step
            kill_container(made, 1)
            wait_for(lambda: watch.step >= step + 2, watch)
            found.append((watch.seen[-1][0] - now, watch.pauses(now - 0.5, now)))

        threads = [threading.Thread(target=one) for one in (watch.follow, kill)]
        with progress.listening(watch.hear):
            for thread in threads:
                thread.start()
            train(asked)
        watch.over.set()
        for thread in threads:
            thread.join()
        return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    rounds = parser.parse_args().rounds
    with lab.running(cores=[None, None]) as made:
        for cpus in CPUS:
            cores = [busy_cores(made, cpus) / cpus for _ in range(rounds)]
            report(
                f"CPUs of a container of {cpus}",
                cores,
                "0.95 to 1.05",
                all(abs(one - 1) <= 0.05 for one in cores),
            )
        memory = [touched_bytes(made, MEMORY) / MEMORY for _ in range(rounds)]
        report(
            "memory at the kill, of its limit",
            memory,
            "0.95 to 1.05",
            all(abs(one - 1) <= 0.05 for one in memory),
        )
        both = [recovery_s(made) for _ in range(rounds)]
        report(
            "container killed, s to two steps",
            [one for one, _ in both],
            "under 2",
            all(one < 2 for one, _ in both),
        )
        report("longest pause before, s", [one for _, one in both], "none", True)


if __name__ == "__main__":
    main()
