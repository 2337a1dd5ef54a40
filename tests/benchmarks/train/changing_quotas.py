"""The adaptive split while hosts get other quotas of the CPU, over ssh: `changing_speeds` on real computing.

    python tests/benchmarks/train/changing_quotas.py [ROUNDS] [--before 0.8 0.4] [--after 0.4 0.8] [--backend B] [--steps 60 140]

Each round (default 5) makes a lab of one host for each quota (`tests/lab.py`, `hosts`; needs root), each kept to a core of this
machine where there are enough, and trains there: so many steps at the quotas before, the batch split in their proportion, then
at those after. What counts is where the split ends: of the steps since its last change, what they reach of the ideal, which is
what the ranks do in the same steps by their own computing times, added up; bar: 93 % within 3 changes. Beside it: the same of
each window between two changes, before the quotas change and after; and of a step since the last change, what it takes, what the
slowest rank computes, and what a rank computes in the mean. Between the last two is waiting, for a split that is not right or
times that waver; between the first two, sums, whose cost hardly depends on the batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.extend(
    str(Path(__file__).parents[2] / "tasks" / "train" / room) for room in ("", "hosts", "rank")
)

import lab
from hosts import BATCH, FREELY, SETTLING, Steps, held, on_hosts, pin, share_of_own, steps_of
from pace import middle
from training_case import ROWS

from trainwright.tasks import progress
from trainwright.tasks.runs.artefacts import SplitEvent
from trainwright.tasks.train import train
from trainwright.tasks.train.launcher.launch import choose_backend

BAR, MOST_CHANGES = 0.93, 3


def trained(given: argparse.Namespace, backend: str) -> tuple[Steps, list[SplitEvent], int]:
    """Train once: every step's rows, rank by rank, the changes of the split, and the step at which the quotas changed."""
    before, after = given.steps
    split = [round(BATCH * quota / sum(given.before)) for quota in given.before]
    split[0] += BATCH - sum(split)
    changed: list[int] = []
    with (
        tempfile.TemporaryDirectory() as name,
        lab.running(cores=[FREELY] * len(split), rate="1gbit") as made,
        held(made, given.before),
    ):

        def listen(event: dict[str, Any]) -> None:
            if event["event"] == "train" and event["step"] >= before and not changed:
                for host, quota in zip(made.hosts, given.after, strict=True):
                    host.hold(quota)
                changed.append(event["step"])

        pin(made, [max(both) for both in zip(given.before, given.after, strict=True)])
        job = {"backend": backend, "model": {"channels": given.channels, "passes": given.passes}}
        epochs = -(-(before + after) * BATCH // ROWS)
        asked = on_hosts(Path(name), made, split, epochs=epochs, adaptive_split=True, **job)
        with progress.listening(listen):
            result = train(asked)
        return steps_of(asked, len(split)), result.split_events, changed[0]


def shares(steps: Steps, bounds: list[int]) -> list[float]:
    """What the whole steps between two bounds reach of their own ideal; NaN where there are hardly any."""
    found = []
    for first, last in pairwise(bounds):
        whole = [
            own
            for own in steps[first + SETTLING : last]
            if sum(row["batch_size"] for row in own) == BATCH
        ]
        found.append(share_of_own(whole) if len(whole) > SETTLING else float("nan"))
    return found


def parts(steps: Steps) -> str:
    """What a step takes, by the means."""
    step, slowest, mean = (
        1e3 * statistics.mean(of(own) for own in steps)
        for of in (
            lambda own: max(row["step_time_s"] for row in own),
            lambda own: max(row["compute_s"] for row in own),
            lambda own: statistics.mean(row["compute_s"] for row in own),
        )
    )
    return f"a step of {step:.0f} ms: the slowest rank computes {slowest:.0f}, a rank {mean:.0f} in the mean"


def main() -> None:
    """Measure, and print a line for each round, and the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument(
        "--before", type=float, nargs="+", default=[0.8, 0.4], help="quotas of cores"
    )
    parser.add_argument("--after", type=float, nargs="+", default=[0.4, 0.8])
    parser.add_argument(
        "--steps", type=int, nargs=2, default=[60, 140], help="at the quotas before and after"
    )
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--backend", default="auto", choices=["auto", "horovod", "torch"])
    given = parser.parse_args()
    if (reason := lab.why_not()) is not None:
        raise SystemExit(reason)
    if len(given.before) != len(given.after):
        parser.error("--before and --after take as many quotas")
    backend = choose_backend(given.backend)
    print(
        f"{backend}, hosts of {given.before} cores, then of {given.after}, batch {BATCH}",
        flush=True,
    )
    ends, counts = [], []
    for _ in range(given.rounds):
        steps, events, changed = trained(given, backend)
        early = [event.step for event in events if event.step <= changed]
        late = [event.step for event in events if event.step > changed]
        at_first = shares(steps, [0, *early, changed])
        at_last = shares(steps, [changed + 1, *late, len(steps)])
        ends.append(at_last[-1])
        counts.append(float(len(late)))
        windows = [" ".join(f"{share:.3f}" for share in part) for part in (at_first, at_last)]
        told = "; ".join(f"step {event.step}: {event.batch_sizes}" for event in events)
        print(
            f"ends at {ends[-1]:.3f} of the new ideal after {len(late)} change(s); windows {windows[0]}, from step {changed} "
            f"{windows[1]}; {told or 'no change'}; {parts(steps[max([changed + 1, *late]) + SETTLING :])}",
            flush=True,
        )
    met = statistics.median(ends) >= BAR and statistics.median(counts) <= MOST_CHANGES
    said = f"{middle(ends)} of the new ideal after {middle(counts)} changes"
    print(f"{said}: {'met' if met else 'missed'} (bar {BAR} within {MOST_CHANGES})")


if __name__ == "__main__":
    main()
