"""Horovod's wheel is cached for each torch and Python, and missing build tools are named."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.infra import horovod


def test_the_wheel_is_cached_by_versions_of_horovod_torch_and_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = horovod.wheel_cache()
    assert cache.is_relative_to(tmp_path / "trainwright" / "wheels")
    assert horovod.VERSION in cache.name
    assert importlib.metadata.version("torch") in cache.name
    assert f"cp{sys.version_info.major}{sys.version_info.minor}" in cache.name


def test_a_cached_wheel_is_used_without_building(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")  # no build tools
    kept = horovod.wheel_cache() / f"horovod-{horovod.VERSION}-cp311-cp311-linux_x86_64.whl"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert horovod.wheel() == kept


def test_missing_build_tools_are_named_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "make").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(OSError, match=r"needs g\+\+, cmake: install them"):
        horovod.wheel()
    assert not horovod.wheel_cache().exists()


def test_the_compiler_wrapper_sets_the_standard_that_torch_needs(tmp_path: Path) -> None:
    compiler = horovod.write_compiler(tmp_path)
    (tmp_path / "g++").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "g++").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(compiler), "-std=c++14", "-std=gnu++14", "-O2", "-DX=a b", "x.cc"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "-std=gnu++20 -std=gnu++20 -O2 -DX=a b x.cc"


def test_an_installed_horovod_is_not_rebuilt() -> None:
    assert horovod.installed()
    done = subprocess.run(
        [sys.executable, "-m", "trainwright.infra.horovod"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""


def test_horovod_that_was_built_for_another_torch_is_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tmp_path / f"horovod-{horovod.VERSION}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Name: horovod\nVersion: {horovod.VERSION}\n")
    monkeypatch.syspath_prepend(tmp_path)
    here = importlib.metadata.version("torch")
    for version, accepted in ((here, True), ("2.0.0", False)):
        folder = horovod.wheel_cache().name.replace(here, version)
        url = (tmp_path / folder / "horovod.whl").as_uri()
        (described / "direct_url.json").write_text(json.dumps({"url": url}))
        assert horovod.installed() == accepted
