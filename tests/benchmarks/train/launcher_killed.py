"""How long the processes of a killed launcher survive it.

    python tests/benchmarks/train/launcher_killed.py [ROUNDS]

Each round (default 5) trains on two local ranks, and on two hosts of a lab (`tests/lab.py`; needs
root), in random order. It kills only the launcher, by SIGKILL, at a random moment after the first
checkpoint. Then it checks every 20 ms whether any of its processes is left: ranks, the spare, ssh,
any process that inherited a mark in the launcher's environment, and on hosts everything but their
sshd. Printed: the seconds from the kill, median and worst (bar: no orphan after 5 s).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

import lab
from hosts_case import SLOW as SLOW_HOST
from hosts_case import on_hosts
from training_case import SLOW, request

LOOK_S, GIVE_UP_S = 0.02, 120.0
BAR_S = 5.0
MARK = "TRAINWRIGHT_BENCHMARK_LAUNCH"
LAUNCH = (
    "import sys; from pathlib import Path; "
    "from trainwright.tasks.train import TrainRequest, train; "
    "train(TrainRequest.model_validate_json(Path(sys.argv[1]).read_text()))"
)


def marked(mark: str) -> list[str]:
    """The command lines of this machine's processes with the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def left_s(folder: Path, made: lab.Lab | None, until_killed_s: float) -> tuple[float, int]:
    """Seconds from the kill until no process is left, and the number of processes before."""
    spec = {"epochs": 500, "checkpoint": {"every_steps": 15}}
    if made is None:
        asked = request(folder, [40, 20], devices=SLOW, **spec)
    else:
        asked = on_hosts(folder, made, [40, 20], SLOW_HOST, **spec)
    (folder / "request.json").write_text(asked.model_dump_json(by_alias=True))
    mark = f"{MARK}={uuid.uuid4().hex}"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(folder / "request.json")],
        env={**os.environ, **dict([mark.split("=")])},
        stderr=subprocess.DEVNULL,
    )

    def left() -> list[str]:
        remote = [line for host in made.hosts for line in host.words()] if made else []
        return marked(mark) + remote

    try:
        wait_until(
            lambda: any(folder.glob("run/checkpoints/*/state.json")) or launcher.poll() is not None
        )
        time.sleep(until_killed_s)
        before = len(left())
        if launcher.poll() is not None:
            raise SystemExit(f"the training ended by itself, with exit code {launcher.returncode}")
    finally:
        launcher.kill()
        killed = time.perf_counter()
        launcher.wait()
    wait_until(lambda: not left())
    return time.perf_counter() - killed, before


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + GIVE_UP_S
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"the condition did not hold within {GIVE_UP_S:g} s")
        time.sleep(LOOK_S)


def main() -> None:
    """Measure, and print a line for local ranks and one for hosts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    places = (
        ["two ranks here"]
        if (reason := lab.why_not())
        else ["two ranks here", "two hosts of a lab"]
    )
    if reason:
        print(reason)
    found: dict[str, list[tuple[float, int]]] = {place: [] for place in places}
    for _ in range(asked.rounds):
        for place in draw.sample(places, len(places)):
            with contextlib.ExitStack() as stack:
                made = (
                    stack.enter_context(lab.running(cores=[None, None])) if "lab" in place else None
                )
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                found[place].append(left_s(Path(folder), made, draw.uniform(0, 3)))
    for place, ones in found.items():
        seconds, counts = [one for one, _ in ones], [count for _, count in ones]
        print(
            f"{place}: no process left after median {statistics.median(seconds):.2f} s, worst "
            f"{max(seconds):.2f} s of {len(seconds)} (bar {BAR_S:g} s: "
            f"{'met' if max(seconds) <= BAR_S else 'missed'}); "
            f"{min(counts)} to {max(counts)} processes, including the launcher"
        )


if __name__ == "__main__":
    main()
