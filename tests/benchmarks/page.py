"""The time to open the page's list of a thousand runs, in Debian's Chromium.

    python tests/benchmarks/page.py [--runs 1000] [--rounds 5]

Bar: all rows appear in less than 3 s. The list opens once cold (the service has not read any run),
then several times in random order with its noise floor, the same page for a job without runs.
Browser and service share this machine's cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "tasks" / "service"), str(TESTS / "tasks")]
import doors  # noqa: E402
from browsing import Watched, browser  # noqa: E402
from finished_run import finished_training  # noqa: E402
from serving import RUN, serving  # noqa: E402


def _filled(store: str, runs: int) -> None:
    """Fill a store with finished runs of ten jobs, all copies of one run."""
    first = finished_training(store, "job-0", 1)
    first.note(state="success", steps={"train": 20.0})
    names = (
        "job.json",
        "status.json",
        "plan.json",
        "estimate.json",
        "result.json",
        "lr_search.json",
        "validation.json",
    )
    contents = {name: first.objects.get(name) for name in names}
    for number in range(2, runs + 1):
        run = doors.run_at(f"{store}/runs/job-{number % 10}/20260101T{number:06d}Z-abcdef")
        for name, content in contents.items():
            run.objects.put(name, content)


def _opened(tab: Watched, screen: str, rows: int) -> tuple[float, float]:
    """Seconds until the first rows appear, and until all do."""
    page: Any = tab.page
    page.goto("about:blank")
    started, first = time.perf_counter(), 0.0
    page.goto(f"{tab.address}/page/#/{screen}", wait_until="commit")
    while True:
        found = page.evaluate(
            "document.querySelectorAll('table[aria-label=Runs] tbody tr').length + "
            "(document.querySelector('.card .note') ? 1 : 0)"
        )
        if found and not first:
            first = time.perf_counter() - started
        if found >= rows:
            return first, time.perf_counter() - started
        if time.perf_counter() - started > 120:
            sys.exit(f"only {found} of {rows} rows after two minutes")
        time.sleep(0.01)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        _filled(f"file://{home / 'store'}", given.runs)
        with serving(home) as address, browser() as chromium:
            tab = Watched(chromium, address, RUN)
            cold = _opened(tab, "runs", given.runs)
            session = tab.context.new_cdp_session(tab.page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            print(f"cold: first rows after {cold[0]:.2f} s, all {given.runs} after {cold[1]:.2f} s")
            took: dict[str, list[tuple[float, float]]] = {"runs": [], "runs?job=none": []}
            order = [name for name in took for _ in range(given.rounds)]
            random.shuffle(order)
            for name in order:
                took[name].append(_opened(tab, name, given.runs if name == "runs" else 1))
            for name, what in (
                ("runs", "warm"),
                ("runs?job=none", "noise floor, a page without rows"),
            ):
                firsts, alls = zip(*took[name], strict=True)
                print(
                    f"{what}: first rows {statistics.median(firsts):.2f} s, "
                    f"all {statistics.median(alls):.2f} s "
                    f"({min(alls):.2f} to {max(alls):.2f})"
                )
            _opened(tab, "runs", given.runs)
            spent = {
                one["name"]: one["value"]
                for one in session.send("Performance.getMetrics")["metrics"]
            }
            print(f"CPU time of the page's main thread: {spent['TaskDuration']:.2f} s")
            print(
                f"bar: below 3 s; worst {max([cold[1], *(one[1] for one in took['runs'])]):.2f} s"
            )
            print("complaints of the console:", tab.complaints or "none")


if __name__ == "__main__":
    main()
