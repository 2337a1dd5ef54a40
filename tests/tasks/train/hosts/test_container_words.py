"""The words that run a host's process in a container, and what a runtime says that can't."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.container_spec import Container
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.train.hosts import versions
from trainwright.tasks.train.hosts.container import contained, why_not_started

WORDS = ["python", "-c", "print('a b')"]


def pool(of_all: dict[str, Any], **host: Any) -> Pool:
    devices = [{"type": "cpu"}]
    other = {"name": "b", "address": "10.0.0.2", "devices": devices, "memory": "4GiB"}
    hosts = [{"name": "a", "address": "10.0.0.1", "devices": devices, **host}, other]
    return validated(Pool, {"name": "p", "container": of_all, "hosts": hosts}, "pool")


def test_without_a_container_the_words_stay() -> None:
    assert contained(None, WORDS) == WORDS
    assert why_not_started(None, "why", 125) is None


def test_limits_devices_and_volumes_are_options_of_the_runtime() -> None:
    container = Container(
        image="/srv/train:O",
        cpus=0.5,
        memory="1GiB",
        devices=["nvidia.com/gpu=all"],
        volumes={"/data": "/data:ro"},
    )
    found = contained(container, WORDS)
    assert found[:2] == ["sh", "-c"]
    assert found[-5:] == ["--rootfs", "/srv/train:O", *WORDS]
    assert contained(container, WORDS, 2**29) == found
    assert "--memory" not in contained(Container(image="a"), WORDS)
    assert f"{2**29}b" in contained(Container(image="a"), WORDS, 2**29)
    pairs = set(itertools.pairwise(found))
    assert {
        ("--cpus", "0.5"),
        ("--memory", f"{2**30}b"),
        ("--memory-swap", f"{2**30}b"),
        ("--device", "nvidia.com/gpu=all"),
        ("--volume", "/data:/data:ro"),
    } <= pairs


@pytest.mark.parametrize("runtime", ["podman", "docker"])
def test_a_process_knows_the_id_of_its_image_and_has_the_cpus_of_slurms_job(
    tmp_path: Path, runtime: str
) -> None:
    """The runtime is a script here that has one image."""
    script = tmp_path / runtime
    script.write_text(
        '#!/bin/sh\nif [ "$1" = image ]; then\n'
        '  [ "$5" = train:1 ] || { echo "Error: $5: no such image" >&2; exit 1; }\n'
        "  echo sha256:abc\nelse printf '%s\\n' \"$@\"; fi\n"
    )
    script.chmod(0o755)
    environment = {
        **os.environ,
        "SLURM_CPUS_PER_TASK": "2",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }

    def run(image: str) -> subprocess.CompletedProcess[str]:
        words = contained(Container(image=image, runtime=runtime), WORDS)
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    done = run("train:1")
    lines = done.stdout.splitlines()
    assert lines[:5] == ["run", "--cpus", "2", "--env", f"{versions.IMAGE}=sha256:abc"]
    assert lines[-4:] == ["train:1", *WORDS]
    absent = run("other:1")
    assert absent.returncode == 125
    for more in ("", "srun: error: h1: task 0: Exited with exit code 125\n"):
        why = why_not_started(Container(image="other:1"), absent.stderr + more, absent.returncode)
        assert why == "container: podman can't run other:1 there (Error: other:1: no such image)"
    assert why_not_started(Container(image="a"), "", 127) == (
        "container: podman can't run a there (exit code 127)"
    )


def test_a_host_has_its_own_container_or_the_pools() -> None:
    found = pool({"image": "train:1", "memory": "2GiB"}, container={"image": "own:1"})
    images = [getattr(found.container_of(host), "image", None) for host in found.hosts]
    assert images == ["own:1", "train:1"]
    assert [one.host_memory_bytes for one in found.devices()] == [None, 2 * 2**30]


@pytest.mark.parametrize(
    ("container", "says"),
    [
        ({"image": "--privileged"}, "image"),
        ({"image": "a b"}, "image"),
        ({"image": "a", "runtime": "crun"}, "runtime"),
        ({"image": "a", "cpus": 0}, "cpus"),
        ({"image": "a", "memory": "much"}, "memory"),
        ({"image": "a", "devices": [""]}, "devices"),
        ({"image": "a", "devices": ["--privileged"]}, "devices"),
        ({"image": "a", "volumes": {"data": "/x"}}, "volumes"),
        ({"image": "a", "volumes": {"": ":::"}}, "volumes"),
        ({"image": "a", "volumes": {"/data": "/x:ro:/y"}}, "volumes"),
    ],
)
def test_a_wrong_container_gives_one_line(container: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=f"container.{says}") as error:
        pool(container)
    assert "\n" not in str(error.value)


def test_this_machine_runs_no_container() -> None:
    with pytest.raises(BadInput, match="not for a, which is this one"):
        pool({"image": "a"}, address="localhost", container={"image": "a"})
    assert (
        pool({"image": "a"}, address="localhost").container_of(
            pool({"image": "a"}, address="localhost").hosts[0]
        )
        is None
    )
    here = [{"name": "a", "devices": [{"type": "cpu"}]}]
    with pytest.raises(BadInput, match="no `container`: every host is this machine"):
        validated(Pool, {"name": "p", "container": {"image": "a"}, "hosts": here}, "pool")


def test_an_image_takes_the_place_of_versions() -> None:
    here = {**versions.facts(), "image": ""}
    there = {**here, "image": "sha256:abc", "versions": {**here["versions"], "python": "3.0"}}
    assert versions.same_image([there, there])
    assert not versions.same_image([there, {**there, "image": "sha256:def"}])
    assert not versions.same_image([here, here])
    assert versions.differences(here, there, "torch") != []
    assert versions.differences(here, there, "torch", one_image=True) == []
    of_horovod = [{**one, "versions": {**one["versions"], "horovod": "1"}} for one in (here, there)]
    without = {**there, "versions": {**there["versions"], "horovod": None}}
    assert versions.differences(*of_horovod, "horovod", one_image=True) == []
    assert versions.differences(of_horovod[0], without, "horovod", one_image=True) == [
        "horovod: 1 here, not installed there"
    ]
    other = {**there, "sources": "0" * 64}
    assert len(versions.differences(here, other, "torch", one_image=True)) == 1
