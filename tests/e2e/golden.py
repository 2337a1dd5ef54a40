"""Small trainings with recordings of every figure, to detect unintended changes.

`python tests/e2e/golden.py --record [CASE ...]` trains each case several times, checks that all
results agree to the last digit, and writes `golden/<case>.json`. `test_golden_runs.py` trains them
once and compares: exactly if the recording was made with this machine's processor and this version
of torch, else within a relative 1e-3 (an accuracy may differ by a few rows, and a noise scale, a
quotient of two small numbers, by 5 %).

It uses only the command line, job, pool and plan files, and the artefacts of the run folder.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outside import Outside, folder_of, plan, pool, read, rows

FOLDER = Path(__file__).with_name("golden")
SOME_ROWS = 0.01
"""for an accuracy on another processor: three of the 359 held-out digits may differ"""
TOLERANCES = {"accuracy": {"abs_tol": SOME_ROWS}, "noise_scale": {"rel_tol": 0.05}}
RECORDED = ("accuracy", "loss", "train_loss")
"""The metrics in recordings; all others follow from sums that `test_metrics.py` checks."""
TOLERANCE = {"rel_tol": 1e-3, "abs_tol": 1e-6}

NET = """
import torch
from torch import nn


def build_model(width=6, norm=False, dropout=0.0):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, bias=not norm),
        nn.BatchNorm2d(width) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(36 * width, 10),
    )
"""
DENSE = """
from torch import nn


def build_model(outputs=3):
    hidden = nn.Linear(6, 16)
    return nn.Sequential(hidden, nn.Tanh(), nn.Linear(16, outputs))
"""
DATA: dict[str, dict[str, Any]] = {
    "digits": {"uri": "builtin:digits", "target": "label", "task": "image-classification"},
    "classes": {"uri": "classes.csv", "target": "kind", "task": "tabular-classification"},
    "amounts": {"uri": "amounts.csv", "target": "amount", "task": "tabular-regression"},
}
EVEN = ({"type": "emulated", "speed": 1e6}, {"type": "emulated", "speed": 1e6})
UNLIKE = ({"type": "emulated", "speed": 1.0}, {"type": "emulated", "speed": 0.6})
"""a step of 60 and 36 samples takes 60 ms"""
SLOW = ({"type": "emulated", "speed": 0.4}, {"type": "emulated", "speed": 0.24})
"""the same step takes 150 ms: long enough to interrupt a training"""
DOUBLE = ({"type": "emulated", "speed": 1e6}, {"type": "emulated", "speed": 5e5})
CORES = ({"type": "cpu", "cores": 1.0}, {"type": "cpu", "cores": 0.5})


@dataclass(frozen=True)
class Case:
    """A training. Its split is the plan file's, or the planner's without a plan file."""

    name: str
    data: str
    train: dict[str, Any]
    devices: tuple[dict[str, Any], ...]
    split: tuple[int, ...] | None
    config: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1

    def job(self, name: str) -> dict[str, Any]:
        """The job file's content."""
        source = "net.py" if self.data == "digits" else "dense.py"
        common = {
            "global_batch_size": 96,
            "learning_rate": 0.01,
            "adaptive_split": False,
            # Only the last: earlier ones are skipped if they come faster than they are stored.
            "checkpoint": {"every_steps": 1000, "keep_best": False},
            "faults": {"restarts": 0},
        }
        return {
            "name": name,
            "pool": f"{name}-pool.yaml",
            "data": DATA[self.data],
            "model": {"source": source, "config": self.config},
            "train": {**common, **self.train},
            "objective": {"minimize": "time"},
            "devices": {"min_count": len(self.devices)},
        }


MOMENTUM = Case(
    "momentum-torch",
    "digits",
    {
        "epochs": 3,
        "learning_rate": 0.08,
        "optimizer": {"name": "momentum", "momentum": 0.8, "weight_decay": 0.001},
        "schedule": "cosine",
        "seed": 3,
        "backend": "torch",
        "checkpoint": {"every_steps": 10, "keep_last": 2},
        "target": {"metric": "accuracy", "value": 0.5},
    },
    UNLIKE,
    (60, 36),
)
ADAM = Case(
    "adam-horovod-planned",
    "digits",
    {
        "epochs": 2,
        "optimizer": {"name": "adam", "weight_decay": 0.01},
        "schedule": "constant",
        "backend": "horovod",
        "learning_rate": 0.004,
    },
    DOUBLE,
    None,
    {"norm": True, "dropout": 0.2},
)
CASES = [
    MOMENTUM,
    ADAM,
    Case(
        "adamw-torch-cpus",
        "classes",
        {
            "epochs": 4,
            "optimizer": {"name": "adamw", "weight_decay": 0.05},
            "backend": "torch",
            "global_batch_size": 64,
            "seed": 1,
        },
        CORES,
        (41, 23),
    ),
    Case(
        "sgd-horovod-accumulated",
        "amounts",
        {
            "epochs": 4,
            "optimizer": {"name": "sgd", "weight_decay": 0.001},
            "backend": "horovod",
            "learning_rate": 0.05,
            "clip_norm": 0.3,
            "global_batch_size": 60,
            "target": {"metric": "loss", "value": 0.01},
        },
        EVEN,
        (38, 22),
        {"outputs": 1},
        accumulation=3,
    ),
]
SEARCH = Case(
    "search-lr",
    "classes",
    {
        "epochs": 3,
        "optimizer": {"name": "momentum"},
        "backend": "torch",
        "learning_rate": "auto",
        "global_batch_size": 64,
    },
    EVEN,
    None,
)
"""not a training, but a search of its learning rate"""


def prepared(folder: Path) -> Outside:
    """A folder with the models and tables of the cases."""
    place = Outside(folder)
    place.write("net.py", NET)
    place.write("dense.py", DENSE)
    draw = random.Random(5)
    kinds, amounts = ["a,b,c,d,e,f,kind"], ["a,b,c,d,e,f,amount"]
    for _ in range(640):
        values = [round(draw.uniform(-1, 1), 4) for _ in range(6)]
        amount = values[0] - 0.5 * values[1] + values[2] * values[3]
        text = ",".join(map(str, values))
        kinds.append(f"{text},{'low' if amount < -0.3 else 'high' if amount > 0.3 else 'mid'}")
        amounts.append(f"{text},{amount:.6f}")
    place.write("classes.csv", "\n".join(kinds) + "\n")
    place.write("amounts.csv", "\n".join(amounts) + "\n")
    return place


def command(place: Outside, case: Case, name: str) -> list[str]:
    """Write a case's files; the arguments that train it as a job of this name."""
    job = place.write(f"{name}.yaml", case.job(name))
    place.write(f"{name}-pool.yaml", pool(*case.devices))
    given = []
    if case.split is not None:
        file = place.write(f"{name}-plan.json", plan(case.devices, case.split, case.accumulation))
        given = ["--plan", str(file)]
    return ["train", str(job), *given]


def trained(place: Outside, case: Case) -> dict[str, Any]:
    """Train a case, and return its record."""
    document = place.done(*command(place, case, case.name), "--new")
    assert document["state"] == "success"
    return observed(folder_of(document["run"]))


def searched(place: Outside) -> dict[str, Any]:
    """Search the learning rate of SEARCH, and return its record."""
    name = f"{SEARCH.name}-{len(list(place.store.glob('runs/*')))}"
    job = command(place, SEARCH, name)[1]
    found = place.done("search-lr", job)
    assert read(place.runs(name)[0] / "lr_search.json") == found
    trials = sorted(found["trials"], key=lambda one: float(one["learning_rate"]))
    return {
        "result": {
            name: found[name] for name in ("learning_rate", "interval", "source", "diverged_at")
        },
        "points": columns(found["points"], list(found["points"][0])),
        "trials": columns(trials, ["learning_rate", "loss", "steps"]),
    }


def observed(run: Path) -> dict[str, Any]:
    """The figures in a trained run's artefacts, without times, energy and memory."""
    result, planned = read(run / "result.json"), read(run / "plan.json")
    ranks = [rows(run, f"steps-rank{rank}") for rank in range(len(planned["devices"]))]
    joint = ["step", "epoch", "loss", "learning_rate", "noise_scale"]
    steps = columns(ranks[0], joint)
    for own in ranks[1:]:
        assert columns(own, joint) == steps  # all ranks have equal rows
    device = ("id", "type", "rank", "batch_size", "samples")
    return {
        "plan": {
            "split": {one["id"]: one["batch_size"] for one in planned["devices"]},
            "global_batch_size": planned["global_batch_size"],
            "accumulation": planned["accumulation"],
        },
        "result": {
            "metrics": _recorded_metrics(result["metrics"]),
            **{
                name: result[name]
                for name in (
                    "state",
                    "target_reached",
                    "learning_rate",
                    "global_batch_size",
                    "steps",
                    "epochs",
                    "noise_scale",
                    "resumed_from_step",
                    "backend",
                    "split_events",
                )
            },
            "devices": [{name: one[name] for name in device} for one in result["devices"]],
        },
        "checkpoints": {
            **columns(result["checkpoints"], ["path", "step", "best"]),
            "metrics": [_recorded_metrics(one["metrics"]) for one in result["checkpoints"]],
        },
        "steps": {
            **steps,
            **{
                f"batch_size, rank {rank}": [row["batch_size"] for row in own]
                for rank, own in enumerate(ranks)
            },
        },
        "epochs": columns(
            rows(run, "epochs"),
            ["step", "epoch", *_recorded_metrics(rows(run, "epochs")[0])],
        ),
    }


def _recorded_metrics(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name in RECORDED}


def columns(records: list[dict[str, Any]], names: list[str]) -> dict[str, list[Any]]:
    """The records by field, with numbers that JSON can represent."""
    return {name: [_finite(record[name]) for record in records] for name in names}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def machine() -> dict[str, Any]:
    """The properties that two machines must share for identical digits."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    vectors = [
        one for one in facts.get("flags", "").split() if one.startswith(("avx", "amx", "fma"))
    ]
    return {
        "processor": facts.get("model name", "unknown"),
        "model": f"{facts.get('cpu family')}/{facts.get('model')}",
        "vectors": " ".join(sorted(vectors)),
        "torch": importlib.metadata.version("torch"),
    }


def recorded(name: str) -> tuple[dict[str, Any], bool]:
    """The recording of a case, and whether this machine must match it exactly."""
    document = read(FOLDER / f"{name}.json")
    return document["observed"], document["machine"] == machine()


def differences(recorded: Any, found: Any, *, exact: bool, path: str = "") -> list[str]:
    """The differences from a recording, one line each."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        names = [*recorded, *(name for name in found if name not in recorded)]
        pairs = [(f"{path}.{name}", recorded.get(name), found.get(name)) for name in names]
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        both = zip(recorded, found, strict=True)
        pairs = [(f"{path}[{number}]", *pair) for number, pair in enumerate(both)]
    else:
        same = _same(recorded, found, None if exact else path)
        return [] if same else [f"{path.lstrip('.')}: recorded {recorded!r}, found {found!r}"]
    return [
        line
        for name, before, now in pairs
        for line in differences(before, now, exact=exact, path=name)
    ]


def _same(before: Any, now: Any, path: str | None) -> bool:
    """Whether two values are equal; with a path, numbers have a tolerance."""
    if path is None or not isinstance(before, float) or not isinstance(now, float | int):
        return bool(type(before) is type(now) and before == now)
    allowed = next((one for name, one in TOLERANCES.items() if name in path), TOLERANCE)
    return math.isclose(before, now, **allowed)


def written(document: dict[str, Any]) -> str:
    """The JSON of a recording, one line for each column of figures."""
    parts = []
    for name, part in document.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()]
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}"


def record(place: Outside, name: str, times: int) -> None:
    """Record a case. Raises AssertionError if two trainings differ."""
    case = next((one for one in CASES if one.name == name), None)
    found = []
    for number in range(times):
        found.append(trained(place, case) if case is not None else searched(place))
        sys.stderr.write(f"{name}: time {number + 1} of {times}\n")
        unlike = differences(found[0], found[-1], exact=True)
        assert not unlike, "\n".join([f"{name} is not deterministic:", *unlike])
    head = json.dumps({"machine": machine()}, indent=1)[2:-2]
    text = written(found[0]).replace("\n", "\n ")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(f'{{\n{head},\n "observed": {text}\n}}\n')
    assert recorded(name) == (found[0], True)


def main() -> None:
    """Record the named cases, or all."""
    known = [*(case.name for case in CASES), SEARCH.name]
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", action="store_true", required=True)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(known))
    given = parser.parse_args()
    if unknown := set(given.cases) - set(known):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        place = prepared(Path(folder) / "place")
        for name in given.cases or known:
            record(place, name, given.times)


if __name__ == "__main__":
    main()
