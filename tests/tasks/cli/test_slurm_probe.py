"""Kinds of nodes of a Slurm cluster, as `scontrol show nodes` lists them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slurm_lab import SlurmLab
from typer.testing import CliRunner

from trainwright.tasks import progress
from trainwright.tasks.cli.main import app
from trainwright.tasks.cli.slurm_probe import pool_document
from trainwright.tasks.errors import BadInput
from trainwright.tasks.slurm.nodes import nodes_of
from trainwright.tasks.spec.pool import Pool, load_pool

SHOWN = """\
NodeName=g{n} Arch=x86_64 CPUAlloc=0 CPUEfctv=64 CPUTot=64 AvailableFeatures=a100,ib \
ActiveFeatures={features} Gres={gres} NodeAddr=g{n} OS=Linux 6.1 #1 SMP @0  RealMemory=512000 \
State={state} MemSpecLimit=12000 Weight=1 Partitions={partitions}  BootTime=2026-01-01T00:00:00
"""


def node(n: int = 1, **fields: str) -> str:
    given = {"features": "(null)", "gres": "(null)", "state": "IDLE", "partitions": "work"}
    return SHOWN.format(n=n, **(given | fields))


def document(*shown: str, default: str = "work", partition: str | None = None) -> dict[str, Any]:
    found = pool_document(nodes_of("".join(shown)), default, partition)
    Pool.model_validate(found)
    return found


def test_equal_nodes_are_one_kind_with_a_count() -> None:
    assert document(node(1), node(2, state="MIXED+PLANNED"), node(3, state="ALLOCATED")) == {
        "name": "probed",
        "engine": "slurm",
        "hosts": [
            {
                "name": "cpu64",
                "count": 3,
                "devices": [{"type": "cpu", "cores": 64.0}],
                "memory": "500000MiB",
            }
        ],
    }


def test_nodes_that_take_no_jobs_are_left_out() -> None:
    states = ("DOWN", "IDLE+DRAIN", "IDLE*", "MIXED+NOT_RESPONDING", "FUTURE", "DOWN+POWERED_DOWN")
    gone = [node(n, state=state) for n, state in enumerate(states, 2)]
    # Slurm starts nodes of a cloud when a job needs them
    cloud = ("IDLE+CLOUD+POWERED_DOWN", "ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP", "IDLE~")
    started = [node(n, state=state) for n, state in enumerate(cloud, 8)]
    assert document(node(1), *gone, *started)["hosts"][0]["count"] == 4
    with pytest.raises(BadInput, match=r"^--partition: got work; .*; allowed: work$"):
        document(*gone, partition="work")


def test_gpus_have_the_type_that_their_name_or_a_feature_says() -> None:
    heard: list[dict[str, Any]] = []
    with progress.listening(heard.append):
        hosts = document(
            node(1, gres="gpu:a100:8(S:0-1)", features="a100,ib", partitions="gpu"),
            node(2, gres="gpu:4,nic:2", features="h100"),
            node(3, gres="gpu:nvidia_a100_80gb_pcie:2"),
        )["hosts"]
    assert hosts[0]["devices"] == [{"type": "nvidia-a100-40gb", "count": 8}]
    assert hosts[0]["slurm"] == {
        "cpus_per_gpu": 8,
        "gres": "gpu:a100",
        "partition": "gpu",
        "constraint": "a100&ib",
    }
    assert hosts[1]["devices"] == [{"type": "nvidia-h100-80gb", "count": 4}]
    assert hosts[1]["slurm"] == {"cpus_per_gpu": 16, "constraint": "h100"}
    assert hosts[2]["devices"] == [{"type": "nvidia-a100-80gb", "count": 2}]
    said = [event["message"] for event in heard if event["event"] == "notice"]
    assert said == [
        "GPUs gpu:a100 may be nvidia-a100-40gb, nvidia-a100-80gb; nvidia-a100-40gb is assumed"
    ]


def test_nodes_with_unknown_gpus_are_left_out_with_a_notice() -> None:
    heard: list[dict[str, Any]] = []
    with progress.listening(heard.append):
        unknown = ("gpu:k80:2", "gpu:2080ti:4(S:0-1)", "nic:2,gpu:3g.20gb:2")
        nodes = [node(n, gres=gres) for n, gres in enumerate(unknown, 2)]
        assert len(document(node(1), *nodes)["hosts"]) == 1
    for name in ("k80", "2080ti", "3g.20gb"):
        assert f"nodes with gpu:{name}:" in str(heard)
    assert "gpu:k80:2: not one known device type; left out" in str(heard)


def test_a_partition_takes_its_nodes_only() -> None:
    found = document(node(1), node(2, partitions="long,gpu"), partition="gpu")
    assert found["slurm"] == {"partition": "gpu"}
    assert [host["count"] for host in found["hosts"]] == [1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--slurm", "--host", "a"], "--host: got it with --slurm"),
        (["--partition", "gpu"], "--partition: got it without --slurm"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["pool", "probe", *options])
    assert isinstance(done.exception, BadInput)
    assert says in str(done.exception)


def test_without_slurm_the_missing_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["pool", "probe", "--slurm"])
    assert str(done.exception).startswith("Slurm: sinfo is not installed on this machine")


@pytest.mark.slow
def test_probe_writes_the_pool_of_a_real_cluster(
    home: Path, tmp_path: Path, slurm: SlurmLab
) -> None:
    out = tmp_path / "pool.yaml"
    done = CliRunner().invoke(app, ["pool", "probe", "--slurm", "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    pool = load_pool(out)
    found = {one["name"]: one for one in json.loads(done.stdout)["hosts"]}
    of_gpu = {"cpus_per_gpu": 1, "gres": "gpu:a100", "constraint": "fast"}
    assert found["a100-40gb"]["slurm"] == of_gpu
    assert [host.name for host in pool.hosts] == ["a100-40gb", "cpu1-1", "cpu1-2"]
    slurm.update_node("h2", "drain")
    try:
        slurm.wait_for(h1="idle", h2="drained", h3="idle")
        shown = CliRunner().invoke(app, ["pool", str(out), "--json"])
        text = CliRunner().invoke(app, ["pool", str(out)]).stdout
    finally:
        slurm.update_node("h2", "resume")
    nodes = json.loads(shown.stdout)["cluster"]["nodes"]
    assert {one["name"]: (one["state"], one["cpus_allocated"]) for one in nodes} == {
        "h1": ("IDLE", 0),
        "h2": ("IDLE+DRAIN", 0),
        "h3": ("IDLE", 0),
    }
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert "idle 2 0 of 2 work,urgent,closed,theirs h1, h3" in lines
    assert {"free", "asked"} & set(text.split()) == {"asked"}  # a narrow table folds the rest


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"engine": "slurm"}, "Slurm's nodes: unknown: Slurm: scontrol is not installed"),
        (
            {"engine": "kubernetes", "kubernetes": {"image": "train:1"}},
            "Kubernetes's nodes: unknown: the cluster is asked at training only",
        ),
    ],
)
def test_a_cluster_that_does_not_say_what_is_free_is_unknown(
    fields: dict[str, Any], why: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [{"name": "cpu", "devices": [{"type": "cpu"}]}]
    (tmp_path / "pool.json").write_text(json.dumps({"name": "p", "hosts": hosts, **fields}))
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["pool", str(tmp_path / "pool.json")])
    assert done.exit_code == 0
    assert why in " ".join(done.stdout.split())
    assert "free" not in done.stdout
