"""The adaptive split while hosts' CPU quotas change, over ssh: `changing_speeds` with real compute.

    python tests/benchmarks/train/changing_quotas.py [ROUNDS] [--before 0.8 0.4] [--after 0.4 0.8]
        [--backend B] [--steps 60 140]

Each round (default 5) creates a lab with one host per quota (`tests/lab.py`, `hosts`; needs root),
each pinned to a core of this machine if there are enough, and trains there: some steps with the
quotas `--before`, the batch split in their proportion, then some with those `--after`.

The result is the throughput after the last change of the split, as a share of the ideal. The ideal
is the sum of the ranks' speeds in the same steps, by their own compute times. The bar is 93 %
within 3 changes. Also printed: the same share for each window between two changes, before and
after the quotas change; and for a step after the last change, its time, the slowest rank's compute
time, and the mean compute time. The difference of the last two is waiting, due to an imperfect
split or to varying times. The difference of the first two is sums, whose cost hardly depends on the
batch.
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
from trainwright.tasks.runs.artefacts.training_result import SplitEvent
from trainwright.tasks.train import train
from trainwright.tasks.train.launcher.launch import choose_backend

BAR, MOST_CHANGES = 0.93, 3


def trained(given: argparse.Namespace, backend: str) -> tuple[Steps, list[SplitEvent], int]:
    """Train once; returns each step's rows, the split's changes, the step of the new quotas."""
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
    """The share of the ideal in the full steps between neighbouring bounds; NaN if too few."""
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
    """The mean times of a step."""
    step, slowest, mean = (
        1e3 * statistics.mean(of(own) for own in steps)
        for of in (
            lambda own: max(row["step_time_s"] for row in own),
            lambda own: max(row["compute_s"] for row in own),
            lambda own: statistics.mean(row["compute_s"] for row in own),
        )
    )
    return (
        f"a step takes {step:.0f} ms: the slowest rank computes {slowest:.0f}, the mean {mean:.0f}"
    )


def main() -> None:
    """Measure, and print a line for each round, and the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument(
        "--before", type=float, nargs="+", default=[0.8, 0.4], help="quotas of cores"
    )
    parser.add_argument("--after", type=float, nargs="+", default=[0.4, 0.8])
    parser.add_argument(
        "--steps", type=int, nargs=2, default=[60, 140], help="with the quotas before and after"
    )
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--backend", default="auto", choices=["auto", "horovod", "torch"])
    given = parser.parse_args()
    if (reason := lab.why_not()) is not None:
        raise SystemExit(reason)
    if len(given.before) != len(given.after):
        parser.error("--before and --after need the same number of quotas")
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
        changes = "; ".join(f"step {event.step}: {event.batch_sizes}" for event in events)
        print(
            f"ends at {ends[-1]:.3f} of the new ideal after {len(late)} change(s); "
            f"windows {windows[0]}, from step {changed} {windows[1]}; {changes or 'no change'}; "
            f"{parts(steps[max([changed + 1, *late]) + SETTLING :])}",
            flush=True,
        )
    met = statistics.median(ends) >= BAR and statistics.median(counts) <= MOST_CHANGES
    result = f"{middle(ends)} of the new ideal after {middle(counts)} changes"
    print(f"{result}: {'met' if met else 'missed'} (bar {BAR} within {MOST_CHANGES})")


if __name__ == "__main__":
    main()
