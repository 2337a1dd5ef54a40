"""The contract of the command line: options, JSON fields, exit codes, kinds of errors.

`python tests/e2e/contract.py --record` runs every command on a small working example and on many
kinds of bad input, and writes `golden/contract.json`. `test_contract.py` does the same and
compares: options, fields and columns may be added, but none may vanish or change its type; exit
codes and kinds of errors must be equal. The wording of messages may change.

It uses only the command line, its input files and its artefacts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from golden import CORES, prepared
from outside import Ended, Outside, folder_of, interrupt, plan, pool, read, wait_until

FILE = Path(__file__).with_name("golden") / "contract.json"
COMMANDS = (
    "run",
    "validate",
    "recommend",
    "extract",
    "calibrate",
    "estimate",
    "plan",
    "search-lr",
    "train",
    "replan",
    "analyze",
    "runs",
    "show",
    "predict",
    "export",
    "up",
    "status",
    "down",
    "serve",
    "pool",
    "pool probe",
)
DATA_KEYS = (
    "operations",
    "alternatives[[]].devices",
    "front[[]].devices",
    "batches[[]].devices",
    "*config",
    "*recipe",
    "*inputs",
    "*input_dtypes",
    "versions",
    "calibrations",
    "*expected",
    "*kwargs",
    "*sample_rows[[]]",
    "files",
)
"""Mappings whose keys are data, such as device ids: the keys count as one field, `*`."""
OPAQUE = (
    "*great_expectations",
    "*observed",
    "*expected.[*]",
    "*kwargs.[*]",
    "*sample_rows[[]].[*]",
    "*config.[*]",
    "*recipe.[*]",
)
"""Fields that contain the user's data, or another library's."""
NULLABLE = ("reference", "power")
"""Fields that depend on the machine, such as those of a power meter."""
Fields = dict[str, list[str]]
TWO = ({"type": "emulated", "speed": 1e6}, {"type": "emulated", "speed": 1e6})
SLOW = ({"type": "emulated", "speed": 0.1}, {"type": "emulated", "speed": 0.1})
PRICES = {"emulated": "0.5/h", "energy": "0.25/kWh"}
NO_SERVER = {
    "TRAINWRIGHT_STORE": "s3://nowhere",
    "TRAINWRIGHT_S3_ENDPOINT": "http://127.0.0.1:9",
    "TRAINWRIGHT_S3_ACCESS_KEY": "a",
    "TRAINWRIGHT_S3_SECRET_KEY": "b",
}
MODELS = {
    "alone.py": """
        import torch
        from torch import nn
        def build_model(width=8): return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
        def example_batch(n): return torch.rand(n, 4), torch.zeros(n).long()
    """,
    "none.py": "x = 1",
    "raises.py": """
        def build_model(): raise ValueError("no width")
    """,
    "nomodule.py": """
        def build_model(): return 3
    """,
    "broken.py": "def build_model(:",
    "narrow.py": """
        from torch.nn import *
        def build_model(): return Sequential(Flatten(), Linear(64, 4))
    """,
    "huge.py": """
        from torch.nn import *
        def build_model():
            return Sequential(Flatten(), Linear(64, 10**10), Linear(10**10, 10))
    """,
    "fails.py": """
        import torch
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(64, 10)
            def forward(self, images):
                if type(images) is torch.Tensor:  # a real tensor: not in a trace
                    raise RuntimeError("no such luck")
                return self.head(images.flatten(1))
        build_model = Model
    """,
    "tires.py": """
        import torch
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(64, 10)
                self.calls = 0
            def forward(self, images):
                self.calls += type(images) is torch.Tensor
                if self.calls > 9:
                    raise RuntimeError("enough of it")
                return self.head(images.flatten(1))
        build_model = Model
    """,
}
BAD_CSV = "a,b,label\n" + "".join(
    f"{n},{'' if n == 13 else n % 3},{'xy'[n % 2]}\n" for n in range(60)
)
GOOD_CSV = "a,b,label\n" + "".join(
    f"{n % 17},{['red', 'green', ''][n % 3]},{'xy'[n % 17 > 8]}\n" for n in range(90)
)
FILES = {
    "advice.csv": GOOD_CSV,
    "empty.yaml": "",
    "list.yaml": "- a",
    "open.yaml": "{",
    "tags.yaml": "a: !!python/object/apply:os.system ['true']",
    "notes.txt": "mine",
    "table.csv": "a,label\n1,x\n2,y\n",
    "rejected.csv": BAD_CSV,
    "cut.json": '{"schema_version": 1,',
    "other.json": '{"name": "something else"}',
}


def files(place: Outside) -> None:
    """Write unusable models, tables and files."""
    for name, text in MODELS.items():
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        place.write(name, "\n".join(line[indent:] for line in lines) + "\n")
    for name, text in FILES.items():
        place.write(name, text)
    (place.folder / "binary.csv").write_bytes(b"a,label\n1,\0\n2,y\n")
    (place.folder / "folder").mkdir()
    place.write("pool.yaml", pool(*TWO, prices=PRICES))


def job(name: str = "contract", /, **changes: Any) -> dict[str, Any]:
    """A valid job with some fields changed; merges mappings."""
    values: dict[str, Any] = {
        "name": name,
        "pool": "pool.yaml",
        "data": {"uri": "builtin:digits"},
        "model": {"source": "net.py", "config": {"width": 6}},
        "train": {
            "epochs": 2,
            "global_batch_size": 96,
            "learning_rate": 0.01,
            "backend": "torch",
            "target": {"metric": "accuracy", "value": 0.3},
            "faults": {"restarts": 0},
        },
        "objective": {"minimize": "time", "deadline": "1h", "budget": 1000.0},
        "devices": {"min_count": 2},
    }
    for field_name, change in changes.items():
        before = values.get(field_name)
        both = isinstance(change, dict) and isinstance(before, dict)
        values[field_name] = {**before, **change} if both else change
    return values


# -- options ---------------------------------------------------------------------------------------


def options(place: Outside, command: str) -> list[str]:
    """The options that a command's help lists."""
    wide = {"COLUMNS": "400", "TERMINAL_WIDTH": "400", "NO_COLOR": "1", "TERM": "dumb"}
    ended = place.run(*command.split(), "--help", **wide)
    assert ended.code == 0, ended
    first = (
        re.match(r"[\s│|*]*((?:-\w[ ,/]+)?--[a-z].*)", line) for line in ended.out.splitlines()
    )
    heads = [re.split(r"\s{2,}", found[1])[0] for found in first if found]
    return sorted({name for head in heads for name in re.findall(r"--[a-z][a-z0-9-]*", head)})


# -- fields ----------------------------------------------------------------------------------------


def fields(value: Any, path: str = "") -> Fields:
    """Each field of a JSON document by its dotted path, with its types; lists are merged."""
    found: dict[str, set[str]] = {}
    _collect(value, path, found)
    return {name: sorted(types) for name, types in sorted(found.items())}


def _collect(value: Any, path: str, found: dict[str, set[str]]) -> None:
    if path:
        found.setdefault(path, set()).add(_type(value))
    if any(fnmatchcase(path, one) for one in OPAQUE):
        found[path] = {"any"}
        return
    if isinstance(value, list):
        for one in value:
            _collect(one, f"{path}[]", found)
    elif isinstance(value, dict):
        data = any(fnmatchcase(path, one) for one in DATA_KEYS)
        for name, one in value.items():
            _collect(one, f"{path}.{'*' if data else name}".lstrip("."), found)


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "number", float: "number", list: "list", dict: "object"}
    return kinds[type(value)]


def vanished(recorded: Fields, now: Fields) -> list[str]:
    """Fields of a recording that are missing or have another type; null matches any type."""
    found = []
    for path, types in recorded.items():
        before, after = set(types), set(now.get(path, []))
        if not after:
            found.append(f"{path}: vanished")
        elif (
            before != {"null"} and not before & after and not (path in NULLABLE and "null" in after)
        ):
            found.append(f"{path}: was {'/'.join(types)}, is {'/'.join(sorted(after))}")
    return found


def always(one: Any, other: Any) -> Any:
    """The fields that two recordings share, each with the types of both."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: always(one[name], other[name]) for name in one if name in other}
    if isinstance(one, list) and isinstance(other, list):
        return sorted({*one, *other})
    assert one == other, (one, other)
    return one


# -- examples --------------------------------------------------------------------------------------


class Examples:
    """The commands' output on working examples. Each command runs once, at its first use."""

    def __init__(self, place: Outside) -> None:
        self.place = place
        self._known: dict[str, Any] = {}
        self.routes: dict[str, list[str]] = {}
        """the service's methods by path; known once `serve` has run"""
        files(place)

    def __call__(self, name: str) -> Any:
        """The document of an example."""
        if name not in self._known:
            self._known[name] = EXAMPLES[name](self)
        return self._known[name]

    def slow(self) -> dict[str, Any]:
        """The observations of a running training, by example."""
        if "slow" not in self._known:
            self._known["slow"] = _slow(self)
        found = self._known["slow"]
        assert isinstance(found, dict)
        return found

    def write_job(self, name: str, **changes: Any) -> str:
        """A job file."""
        return str(self.place.write(f"{name}.yaml", job(name, **changes)))

    def run_folder(self) -> Path:
        """The folder of the run that `search-lr` started and `train` finished."""
        return folder_of(self("train")["run"])


def advice(name: str = "advice", /, **changes: Any) -> dict[str, Any]:
    """A valid job without a model."""
    values = job(name, data={"uri": "advice.csv"}, devices={"min_count": 1}, **changes)
    return {key: value for key, value in values.items() if key not in ("model", "train")}


def _recommend(here: Examples) -> Any:
    job_file = str(here.place.write("advice.yaml", advice()))
    return here.place.done("recommend", job_file, "--out", "advised")


def _calibrate(here: Examples, *more: str) -> Any:
    out = here.place.folder / ("few.json" if "--probes" in more else "cpu.json")
    given = ("--budget", "1", "--most-drift", "1e9", "--out", str(out))
    document = here.place.done("calibrate", *given, *more)
    written = read(out)
    assert written["mode"] == ("few-shot" if "--probes" in more else "calibrated")
    assert document == {name: value for name, value in written.items() if name != "families"}
    return document


def _estimate(here: Examples) -> Any:
    here("calibrate")
    here("calibrate --probes")
    one = here.place.done(
        "estimate", "alone.py", "--batch-size", "32", "--device-type", "nvidia-t4"
    )
    two, few = (
        here.place.done("estimate", "alone.py", "--batch-size", "32", "--calibration", file)
        for file in ("cpu.json", "few.json")
    )
    assert [each["mode"] for each in (one, two, few)] == ["datasheet", "calibrated", "few-shot"]
    return [one, two, few]


def _plan(here: Examples) -> Any:
    return here.place.done("plan", here.write_job("planned", devices={"min_count": 1}))


def _plan_cpus(here: Examples) -> Any:
    here("calibrate")
    here.place.write("cpus-pool.yaml", pool(*CORES))
    job_file = here.write_job("cpus", pool="cpus-pool.yaml", objective={"budget": None})
    return here.place.done("plan", job_file, "--calibration", "cpu.json")


def _joint_plan(here: Examples) -> Any:
    goal = {"minimize": "energy", "budget": None}
    two = [here.write_job(name, objective=goal) for name in ("first", "second")]
    return here.place.done("plan", *two)


SEARCHED = {"learning_rate": "auto", "optimizer": {"name": "momentum"}}


def _search(here: Examples) -> Any:
    return here.place.done("search-lr", here.write_job("contract", train=SEARCHED))


def _train(here: Examples) -> Any:
    here("search-lr")
    document = here.place.done("train", str(here.place.folder / "contract.yaml"))
    assert document["state"] == "success"
    assert [folder_of(document["run"])] == here.place.runs("contract")  # the same run continued
    return document


def _runs(here: Examples) -> Any:
    here("train")
    return here.place.done("runs")


def _slow(here: Examples) -> dict[str, Any]:
    """Observe a training, start it a second time, replan it, and interrupt it."""
    place = here.place
    place.write("slow-pool.yaml", pool(*SLOW, prices=PRICES))
    given = ["train", here.write_job("slow", pool="slow-pool.yaml", train={"epochs": 20}), "--json"]
    with place.started(*given) as process:
        wait_until(lambda: bool(list(place.store.glob("runs/slow/*/metrics/steps-*"))), process)
        (run,) = place.runs("slow")
        seen = {
            "pool, held": place.done("pool", "slow-pool.yaml"),
            "show, running": place.done("show", run.as_uri()),
            "held": refusal(place.run(*given)),
            "replan": place.done("replan", run.as_uri()),
        }
        interrupted = refusal(interrupt(process))
    interrupted["fields"].pop("error.step", None)  # missing if it was just being replanned
    return {**seen, "interrupted": interrupted}


def _serve(here: Examples) -> Any:
    """The output of `serve`. Records the routes in its OpenAPI document."""
    with here.place.started("serve", "--port", "0", "--json") as process:
        assert process.stdout is not None
        lines = list(itertools.takewhile(lambda line: line != "}\n", process.stdout))
        said = json.loads("".join(lines) + "}")
        token = Path(said["token"]).read_text().strip()
        asked = urllib.request.Request(
            f"{said['address']}/openapi.json", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            described = json.load(answer)
        ended = interrupt(process)
    assert ended.code in (0, 130), ended
    here.routes = {path: sorted(methods) for path, methods in described["paths"].items()}
    return said


def _predict(here: Examples) -> Any:
    rows, out = here.place.folder / "rows.npz", here.place.folder / "predictions.parquet"
    np.savez(rows, images=np.zeros((3, 1, 8, 8)), other=np.zeros(3), inputs=np.zeros((3, 1, 8, 8)))
    return here.place.done("predict", here("run")["run"], str(rows), "--out", str(out))


def _export(here: Examples) -> Any:
    out = here.place.folder / "exported"
    return here.place.done("export", here("run")["run"], "--to", "onnx", "--out", str(out))


def _up(here: Examples) -> Any:
    """Start the embedded stack in its own home, and stop it."""
    place = Outside(here.place.folder / "stack")
    try:
        up = place.done("up")
        return {"up": up, "status": place.done("status")}
    finally:
        place.done("down")


EXAMPLES: dict[str, Callable[[Examples], Any]] = {
    "validate": lambda here: here.place.done("validate", here.write_job("validated")),
    "recommend": _recommend,
    "extract": lambda here: here.place.done("extract", "alone.py", "--config", "width=4"),
    "calibrate": _calibrate,
    "calibrate --probes": lambda here: _calibrate(here, "--probes"),
    "estimate": _estimate,
    "plan": _plan,
    "plan, CPUs": _plan_cpus,
    "plan, several jobs": _joint_plan,
    "search-lr": _search,
    "train": _train,
    "analyze": lambda here: here.place.done("analyze", here.run_folder().as_uri()),
    "runs": _runs,
    "show": lambda here: here.place.done("show", here.run_folder().name),
    "show, running": lambda here: here.slow()["show, running"],
    "replan": lambda here: here.slow()["replan"],
    "pool, held": lambda here: here.slow()["pool, held"],
    "pool": lambda here: here.place.done("pool", "pool.yaml"),
    "pool probe": lambda here: here.place.done("pool", "probe"),
    "status": lambda here: here.place.done("status"),
    "down": lambda here: here.place.done("down"),
    "serve": _serve,
    "run": lambda here: here.place.done("run", here.write_job("whole", train=SEARCHED)),
    "predict": _predict,
    "export": _export,
    "up": _up,
}
WITH_AIRFLOW = ("run", "predict", "export", "up")
ARTEFACTS = (
    "job.json",
    "validation.json",
    "structure.json",
    "estimate.json",
    "plan.json",
    "lr_search.json",
    "result.json",
    "status.json",
)
SEALED = ("manifest.json", "report/report.json", "model/signature.json")
"""artefacts that only a complete run has"""
TABLES = ("steps-rank0", "steps-rank1", "epochs")


def artefact_fields(run: Path, names: Iterable[str]) -> dict[str, Fields]:
    """The fields of a run's artefacts."""
    return {name: fields(read(run / name)) for name in names}


def tables(run: Path) -> dict[str, Fields]:
    """The columns of a run's rows under metrics/."""
    found: dict[str, Fields] = {}
    for kind in TABLES:
        part = min((run / "metrics").glob(f"{kind}-*.parquet"))
        found[kind] = {one.name: [str(one.type)] for one in pq.read_schema(part)}
    return found


# -- refusals --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """A command that must be refused: its arguments, and its job and pool."""

    args: tuple[str, ...]
    job: dict[str, Any] | None = None
    pool: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    also: dict[str, str] = field(default_factory=dict)
    """more files"""

    def run(self, place: Outside, name: str) -> dict[str, Any]:
        """The refusal. JOB, POOL and PLAN stand for the files, RUN and STORE for a run's."""
        names = {"JOB": f"{name}.yaml", "POOL": f"{name}-pool.yaml", "PLAN": f"{name}-plan.json"}
        if self.job is not None:
            given = {**self.job, **({"pool": names["POOL"]} if self.pool is not None else {})}
            place.write(names["JOB"], given)
        if self.pool is not None:
            place.write(names["POOL"], self.pool)
        for kind, text in self.also.items():
            place.write(names[kind], text)
        args = [names.get(one, one) for one in self.args]
        return refusal(place.run(*args, "--json", **self.environment))


def refusal(ended: Ended) -> dict[str, Any]:
    """Exit code, kind and fields of an error. Checks its line on standard error."""
    document = ended.document()
    last = ended.err.strip().splitlines()[-1]
    assert last.startswith("trainwright: "), ended
    assert "Traceback" not in ended.err, ended
    assert document["error"]["message"], ended
    return {
        "code": ended.code,
        "kind": document["error"]["kind"],
        "state": document.get("state"),
        "fields": fields(document),
    }


def _planned(**changes: Any) -> Bad:
    """`plan` of a changed job."""
    return Bad(("plan", "JOB"), job("refused", **changes))


def _pooled(given: dict[str, Any], **changes: Any) -> Bad:
    """`plan` with a changed pool."""
    return Bad(("plan", "JOB"), job("refused", **changes), {**pool(*TWO), **given})


def _trained(plan_file: str, **changes: Any) -> Bad:
    """`train` by a plan file that can't be followed."""
    return Bad(
        ("train", "JOB", "--plan", "PLAN"), job("refused", **changes), also={"PLAN": plan_file}
    )


def _host(*devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"hosts": [{"name": "h", "devices": list(devices), **more}]}


GOOD_PLAN = plan(TWO, (48, 48))
NOWHERE = "file:///nowhere/runs/x/20260101T000000Z-abcdef"
REFUSALS: dict[str, Bad] = {
    # usage
    "argument missing": Bad(("run",)),
    "command unknown": Bad(("fly",)),
    "option unknown": Bad(("plan", "x", "--colour")),
    "job file missing": Bad(("run", "nowhere.yaml")),
    "job file empty": Bad(("plan", "empty.yaml")),
    "job file a list": Bad(("plan", "list.yaml")),
    "job file cut": Bad(("plan", "open.yaml")),
    "job file with tags": Bad(("plan", "tags.yaml")),
    "job file a folder": Bad(("plan", "folder")),
    # fields of the job
    "field unknown": _planned(wat=1),
    "field unknown, nested": _planned(train={"epoch": 1}),
    "name wrong": _planned(name="../x"),
    "type wrong": _planned(train={"epochs": "many"}),
    "epochs zero": _planned(train={"epochs": 0}),
    "learning rate negative": _planned(train={"learning_rate": -1.0}),
    "optimizer unknown": _planned(train={"optimizer": {"name": "magic"}}),
    "backend unknown": _planned(train={"backend": "magic"}),
    "batch bounds reversed": _planned(train={"batch_bounds": [64, 32]}),
    "accuracy no share": _planned(train={"target": {"metric": "accuracy", "value": 97}}),
    "batch above the data": _planned(train={"global_batch_size": 10**6}),
    "cron wrong": _planned(schedule={"cron": "sometimes"}),
    "deadline no time": _planned(objective={"deadline": "soon"}),
    "budget negative": _planned(objective={"budget": -1}),
    "priority too high": _planned(priority=101),
    # data
    "data missing": _planned(data={"uri": "nowhere.csv"}),
    "data set unknown": _planned(data={"uri": "builtin:letters"}),
    "data scheme unknown": _planned(data={"uri": "ftp://x/y.csv"}),
    "data not text": _planned(data={"uri": "binary.csv"}),
    "target column missing": _planned(data={"uri": "table.csv", "target": "price"}),
    "data missing, validated": Bad(("validate", "JOB"), job(data={"uri": "nowhere.csv"})),
    "data rejected": Bad(("validate", "JOB"), job(data={"uri": "rejected.csv"})),
    "data rejected, trained": Bad(
        ("train", "JOB"), job("rejected", data={"uri": "rejected.csv"}, model={"source": "net.py"})
    ),
    # models
    "model missing": _planned(model={"source": "nowhere.py"}),
    "model too narrow": _planned(model={"source": "narrow.py", "config": {}}),
    "model config unknown": _planned(model={"config": {"height": 3}}),
    "model without build_model": Bad(("extract", "none.py")),
    "model raises": Bad(("extract", "raises.py")),
    "model no module": Bad(("extract", "nomodule.py")),
    "model no Python": Bad(("extract", "broken.py")),
    "model without example_batch": Bad(("extract", "narrow.py")),
    "config no assignment": Bad(("extract", "alone.py", "--config", "width")),
    "precision unknown": Bad(("extract", "alone.py", "--precision", "fp7")),
    "batch size zero": Bad(("extract", "alone.py", "--batch-size", "0")),
    # recommendations
    "template unknown": Bad(("recommend", "JOB"), advice(recommend={"templates": ["oracle"]})),
    "deadline below every candidate": Bad(
        ("recommend", "JOB"), advice(objective={"deadline": "1us"})
    ),
    "recommended over a file": Bad(("recommend", "JOB", "--out", "notes.txt"), advice()),
    # estimates and calibrations
    "no device to estimate": Bad(("estimate", "alone.py", "--batch-size", "8")),
    "batch size no number": Bad(
        ("estimate", "alone.py", "--batch-size", "x", "--device-type", "cpu")
    ),
    "device type unknown": Bad(
        ("estimate", "alone.py", "--batch-size", "8", "--device-type", "tpu-v5")
    ),
    "calibration cut": Bad(
        ("estimate", "alone.py", "--batch-size", "8", "--calibration", "cut.json")
    ),
    "calibration of another kind": Bad(("plan", "JOB", "--calibration", "other.json"), job()),
    "structure of another kind": Bad(
        ("estimate", "other.json", "--batch-size", "8", "--device-type", "cpu")
    ),
    "calibrate nothing to write": Bad(("calibrate",)),
    "calibrate into no folder": Bad(("calibrate", "--out", "/nowhere/cpu.json")),
    "calibrate over another file": Bad(("calibrate", "--out", "notes.txt")),
    "calibrate a GPU by networks": Bad(("calibrate", "--out", "x.json", "--device", "cuda:0")),
    "calibrate no budget": Bad(("calibrate", "--out", "x.json", "--budget", "0")),
    "calibrate no threads": Bad(("calibrate", "--out", "x.json", "--threads", "0")),
    "calibrate drift": Bad(
        ("calibrate", "--out", "x.json", "--probes", "--budget", "1", "--most-drift", "0")
    ),
    # pools
    "pool file missing": Bad(("pool", "nowhere.yaml")),
    "pool file of another kind": Bad(("pool", "other.json")),
    "pool without hosts": _pooled({"hosts": []}),
    "pool with an unknown device": _pooled(_host({"type": "abacus"})),
    "pool with speed of a CPU": _pooled(_host({"type": "cpu", "speed": 1.0})),
    "pool with a window wrong": _pooled(_host({"type": "cpu"}, available="noon")),
    "pool with a price wrong": _pooled({"prices": {"cpu": "-2/h"}}),
    "pool with a network wrong": _pooled({"network": {"bandwidth": 10}}),
    "pool with power wrong": _pooled({"power": {"cpu": {"idle_w": 9, "load_w": 3}}}),
    "devices too few": _planned(devices={"min_count": 3}),
    "devices of no such type": _planned(devices={"types": ["nvidia-t4"]}),
    "devices all excluded": _planned(devices={"exclude": ["emulated"]}),
    "devices by an unknown id": _planned(devices={"ids": ["here/emulated-7"]}),
    "prices missing": _pooled({}, objective={"minimize": "cost"}),
    # plans
    "deadline infeasible": _planned(objective={"deadline": "1s"}),
    "budget infeasible": _planned(objective={"budget": 1e-9}),
    "memory infeasible": _pooled(
        _host({"type": "nvidia-t4"}, address="10.0.0.1"),
        model={"source": "huge.py", "config": {}},
        objective={"budget": None},
        devices={"min_count": 1},
    ),
    "pools of two jobs differ": Bad(("plan", "JOB", "planned.yaml"), job("refused"), pool(*TWO)),
    "plot of no kind": Bad(("plan", "JOB", "--plot", "front.txt"), job()),
    "jobs late together": Bad(
        ("plan", "JOB", "energy.yaml"),
        job("late", objective={"minimize": "energy", "deadline": "1s", "budget": None}),
    ),
    "plan file missing": Bad(("train", "JOB", "--plan", "nowhere.json"), job("refused")),
    "plan file cut": _trained(GOOD_PLAN[:200]),
    "plan file of another kind": _trained('{"name": "x"}'),
    "plan without devices": _trained(plan((), ())),
    "plan of an unknown strategy": _trained(GOOD_PLAN.replace("data-parallel", "nonsense")),
    # training
    "deadline infeasible, trained": Bad(
        ("train", "JOB"), job("hurried", objective={"deadline": "1s"})
    ),
    "model fails at once": Bad(
        ("train", "JOB"), job("failing", model={"source": "fails.py", "config": {}})
    ),
    "model fails at a step": Bad(
        ("train", "JOB"), job("tiring", model={"source": "tires.py", "config": {}})
    ),
    "loss runs away": Bad(
        ("train", "JOB"),
        job(
            "away",
            train={"learning_rate": 1e6, "optimizer": {"name": "sgd", "weight_decay": 1e6}},
        ),
    ),
    # runs
    "run no name": Bad(("show", "nonsense")),
    "run unknown": Bad(("show", NOWHERE)),
    "run unknown, analyzed": Bad(("analyze", NOWHERE)),
    "run unknown, planned anew": Bad(("replan", NOWHERE)),
    "run unknown, replayed": Bad(("run", "JOB", "--replay", NOWHERE), job()),
    "run finished, planned anew": Bad(("replan", "RUN")),
    "run of another job, replayed": Bad(("run", "JOB", "--replay", "RUN"), job("other")),
    "run not finished, exported": Bad(("export", "UNFINISHED", "--to", "onnx")),
    "run unknown, exported": Bad(("export", NOWHERE, "--to", "onnx")),
    "export unknown": Bad(("export", NOWHERE, "--to", "flatbuffer")),
    "run not finished, analyzed": Bad(("analyze", "UNFINISHED")),
    "run damaged": Bad(("show", "DAMAGED")),
    "run not finished, predicted": Bad(("predict", "RUN", "table.csv", "--out", "out.csv")),
    "rows not there": Bad(("predict", "RUN", "nowhere.csv", "--out", "out.csv")),
    "report over another file": Bad(("show", "RUN", "--report", "notes.txt")),
    "job's name wrong": Bad(("runs", "../..")),
    "store empty, analyzed": Bad(("analyze", "--store", "STORE")),
    "store not there": Bad(("runs", "--store", "file:///nowhere")),
    "store of no scheme": Bad(("runs", "--store", "ftp://x")),
    # services
    "store out of reach": Bad(("runs",), environment=NO_SERVER),
    "store out of reach, run": Bad(("run", "JOB"), job(), environment=NO_SERVER),
    "store not started": Bad(("runs", "--store", "s3://nowhere")),
    "ledger no URL": Bad(("pool",), environment={"TRAINWRIGHT_LEDGER": "nope"}),
    "home not writable": Bad(("pool",), environment={"TRAINWRIGHT_HOME": "/proc/nowhere"}),
    "serve nobody": Bad(("serve", "--workers", "0")),
    "serve no folder": Bad(("serve", "--allow", "nowhere")),
}
SLOW_REFUSALS = ("plan without devices", "model fails at once", "loss runs away")
ASKED = ("held", "interrupted")
"""refusals with a running training: a second training of the same job, and Ctrl-C"""


def refused(here: Examples, name: str) -> dict[str, Any]:
    """The refusal of a bad input."""
    if name in ASKED:
        answer = here.slow()[name]
        assert isinstance(answer, dict)
        return answer
    bad, place = REFUSALS[name], here.place
    words = set(bad.args)
    stands: dict[str, str] = {"STORE": (place.folder / "empty").as_uri()}
    (place.folder / "empty").mkdir(exist_ok=True)
    if "planned.yaml" in words:
        here.write_job("planned")
    if "energy.yaml" in words:
        here.write_job("energy", objective={"minimize": "energy", "budget": None})
    if words & {"RUN", "DAMAGED", "UNFINISHED"}:
        run = here.run_folder()
        stands["RUN"] = run.as_uri()
        for kind in words & {"DAMAGED", "UNFINISHED"}:
            copy = place.folder / kind.lower() / "runs" / "contract" / run.name
            if not copy.exists():
                shutil.copytree(run, copy)
                (copy / "result.json").unlink()
                if kind == "DAMAGED":
                    (copy / "result.json").write_text("{")
            stands[kind] = copy.as_uri()
    filled = Bad(
        tuple(stands.get(one, one) for one in bad.args),
        bad.job,
        bad.pool,
        bad.environment,
        bad.also,
    )
    return filled.run(place, re.sub(r"\W+", "-", name))


# -- recording -------------------------------------------------------------------------------------


@contextlib.contextmanager
def example_place() -> Iterator[Examples]:
    """Examples in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        here = Examples(prepared(Path(folder) / "place"))
        try:
            yield here
        finally:
            here.place.run("down")


def record(here: Examples, names: Sequence[str]) -> dict[str, Any]:
    """The current contract of these examples and refusals, and of the commands' options."""
    contract: dict[str, dict[str, Any]] = {
        "options": {one: options(here.place, one) for one in COMMANDS},
        "fields": {},
        "artefacts": {},
        "tables": {},
        "routes": {},
        "refusals": {},
    }
    for name in names:
        sys.stderr.write(f"{name}\n")
        if name in EXAMPLES:
            contract["fields"][name] = fields(here(name))
        else:
            contract["refusals"][name] = refused(here, name)
    if "train" in names:
        contract["artefacts"] |= artefact_fields(here.run_folder(), ARTEFACTS)
        contract["tables"] = tables(here.run_folder())
    if "run" in names:
        contract["artefacts"] |= artefact_fields(folder_of(here("run")["run"]), SEALED)
    contract["routes"] = here.routes
    return contract


def written(contract: dict[str, Any]) -> str:
    """The JSON of a recording, one line for each option, field or refusal."""
    parts = []
    for section, entries in contract.items():
        blocks = []
        for name, entry in entries.items():
            if isinstance(entry, dict) and section != "refusals":
                lines = [
                    f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()
                ]
                text = "{\n" + ",\n".join(lines) + "\n  }"
            else:
                text = json.dumps(entry)
            blocks.append(f"  {json.dumps(name)}: {text}")
        parts.append(f" {json.dumps(section)}: {{\n" + ",\n".join(blocks) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Record the contract that two runs of all examples, or of the named ones, share."""
    known = [*EXAMPLES, *REFUSALS, *ASKED]
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--record", action="store_true", required=True)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    names = parser.parse_args().names or known
    if unknown := set(names) - set(known):
        parser.error(f"no such example: {', '.join(sorted(unknown))}")
    twice = []
    for _ in range(2):
        with example_place() as here:
            twice.append(record(here, names))
    contract = always(*twice)
    before = read(FILE) if FILE.exists() else {}
    for section, entries in contract.items():
        kept = {} if names == known else before.get(section, {})
        contract[section] = kept | entries
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(written(contract))


if __name__ == "__main__":
    main()
