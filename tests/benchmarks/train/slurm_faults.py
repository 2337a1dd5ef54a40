"""How fast a training on Slurm recovers, and how fast it gives its nodes back.

    python tests/benchmarks/train/slurm_faults.py [ROUNDS] [--kinds KIND ...]

Starts a Slurm cluster of three nodes in network namespaces of this machine (`tests/slurm_lab.py`;
needs root), and trains ROUNDS times (default 3) for each kind of fault, with one rank on each node:

    down        scontrol sets a node down
    silent      a node is cut off from the network
    preempted   a job of a partition of higher priority takes a node
    killed      the launcher is killed by SIGKILL, while three of its jobs run and one waits

Printed, median and worst: the seconds from the fault until the others have finished a step;
for a preemption, the longest pause between two steps, and the seconds until the other job runs; for
a killed launcher, the seconds until no process of the training is left on the nodes, and until the
queue is empty.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

from hosts_case import SLOW
from recovery import Watch
from slurm_case import on_slurm
from slurm_lab import SlurmLab, running, why_not

from trainwright.tasks import progress
from trainwright.tasks.errors import Interrupted
from trainwright.tasks.train import train

LAUNCH = (
    "import sys; from pathlib import Path; "
    "from trainwright.tasks.train.hosts import arrivals; arrivals.BEGIN_AFTER_S = 0.0; "
    "from trainwright.tasks.train import TrainRequest, train; "
    "train(TrainRequest.model_validate_json(Path(sys.argv[1]).read_text()))"
)
KINDS = ("down", "silent", "preempted", "killed")
BARS = {
    "down: steps again": 2.0,
    "silent: steps again": 25.0,
    "preempted: other job runs": 20.0,
    "killed: no process": 1.0,
    "killed: queue empty": 10.0,
}
GIVE_UP_S = 120.0
Figures = dict[str, float]


def until(condition: Callable[[], bool]) -> float:
    """Wait for a condition. Returns the time at which it held."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > GIVE_UP_S:
            raise SystemExit(f"the condition did not hold within {GIVE_UP_S:g} s")
        time.sleep(0.005)
    return time.monotonic()


def faulted(cluster: SlurmLab, folder: Path, kind: str) -> Figures:
    """Train, and lose a node."""
    asked = on_slurm(folder, cluster, [30, 20, 10], SLOW, epochs=2000, backend="torch")
    watch, stop, found = Watch(folder), threading.Event(), Figures()

    def act() -> None:
        try:
            until(lambda: watch.step >= 30)
            begun = time.monotonic()
            if kind == "down":
                cluster.update_node("h2", "down")
            elif kind == "silent":
                cluster.lab.cut("h2")
            else:
                subprocess.run(["srun", "--quiet", "-p", "urgent", "-w", "h2", "true"], check=True)
                found["preempted: other job runs"] = time.monotonic() - begun
            until(lambda: bool(watch.groups))
            step = watch.step
            again = until(lambda: watch.step > step)
            if kind == "preempted":
                found["preempted: longest pause"] = watch.pauses(begun, again)
            else:
                found[f"{kind}: steps again"] = again - begun
        finally:
            stop.set()

    threads = [threading.Thread(target=one) for one in (act, watch.follow)]
    with progress.listening(watch.hear):
        for one in threads:
            one.start()
        with contextlib.suppress(Interrupted):
            train(asked, stop=stop)
        watch.over.set()
        for one in threads:
            one.join()
    if kind == "silent":
        cluster.lab.join("h2")
    elif kind == "down":
        with contextlib.suppress(OSError):  # it may be back by itself
            cluster.update_node("h2", "resume")
    return found


def killed(cluster: SlurmLab, folder: Path) -> Figures:
    """Train, and kill the launcher."""
    asked = on_slurm(folder, cluster, [30, 20, 10, 10], SLOW, epochs=2000, backend="torch")
    (folder / "request.json").write_text(asked.model_dump_json(by_alias=True))
    command = [sys.executable, "-c", LAUNCH, str(folder / "request.json")]
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until(lambda: any(folder.glob("run/checkpoints/*/state.json")))
    finally:
        launcher.send_signal(signal.SIGKILL)
        begun = time.monotonic()
        launcher.wait()

    def ours() -> list[str]:
        words = [line for host in cluster.lab.hosts for line in host.words()]
        return [line for line in words if not line.startswith("slurm")]

    return {
        "killed: no process": until(lambda: not ours()) - begun,
        "killed: queue empty": until(lambda: not cluster.queue()) - begun,
    }


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    given = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(reason)
    figures: dict[str, list[float]] = {}
    with running() as cluster:
        os.environ["SLURM_CONF"] = str(cluster.config)
        for kind in [kind for _ in range(given.rounds) for kind in given.kinds]:
            cluster.wait_until_idle()
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                is_killed = kind == "killed"
                found = killed(cluster, folder) if is_killed else faulted(cluster, folder, kind)
            for what, seconds in found.items():
                figures.setdefault(what, []).append(seconds)
                print(f"   {what} {seconds:.2f} s", flush=True)
    for what, every in figures.items():
        worst, bar = max(every), BARS.get(what)
        verdict = f" (bar {bar:g} s: {'met' if worst < bar else 'missed'})" if bar else ""
        print(
            f"{what}: median {statistics.median(every):.2f} s, worst {worst:.2f} s of "
            f"{len(every)}{verdict}"
        )


if __name__ == "__main__":
    main()
