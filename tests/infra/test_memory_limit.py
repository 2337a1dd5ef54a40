"""The memory limit of a container, from a folder with cgroup files of both versions."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from trainwright.infra.memory_limit import usable_memory_bytes

MIB = 2**20


def _given(folder: Path, of_process: str, limits: dict[str, str]) -> int:
    for name, text in limits.items():
        file = folder / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    (folder / "of-process").write_text(of_process)
    return usable_memory_bytes(folder / "cgroup", folder / "of-process")


@pytest.mark.parametrize(
    ("of_process", "limits", "least"),
    [
        ("0::/\n", {"memory.max": f"{64 * MIB}"}, 64 * MIB),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": f"{32 * MIB}"}, 32 * MIB),
        ("0::/a/b\n", {"a/b/memory.max": f"{16 * MIB}", "a/memory.max": f"{32 * MIB}"}, 16 * MIB),
        ("5:cpu:/x\n4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": f"{8 * MIB}"}, 8 * MIB),
        ("4:memory,pids:/d\n0::/\n", {"memory/d/memory.limit_in_bytes": f"{8 * MIB}"}, 8 * MIB),
    ],
)
def test_the_lowest_limit_of_a_processs_cgroups_applies(
    of_process: str, limits: dict[str, str], least: int, tmp_path: Path
) -> None:
    assert _given(tmp_path, of_process, limits) == least


@pytest.mark.parametrize(
    ("of_process", "limits"),
    [
        ("", {}),
        ("0::/a\n", {"a/memory.max": "max"}),
        ("0::/a\n", {"b/memory.max": "1"}),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}),
        ("3:cpu:/\n", {"memory/memory.limit_in_bytes": "1"}),
    ],
)
def test_without_a_limit_the_machines_memory_applies(
    of_process: str, limits: dict[str, str], tmp_path: Path
) -> None:
    assert _given(tmp_path, of_process, limits) == psutil.virtual_memory().total


def test_without_cgroups_the_machines_memory_applies(tmp_path: Path) -> None:
    assert usable_memory_bytes(tmp_path, tmp_path / "none") == psutil.virtual_memory().total
