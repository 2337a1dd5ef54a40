"""The manual's example of a layout gives the plan and the refusal that the manual shows."""

from __future__ import annotations

import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import run
from doc_pages import LAYOUTS, example

FILES = ("wide.py", "two-hosts.yaml", "wide.yaml")


@pytest.fixture
def planned(home: Path, tmp_path: Path) -> Path:
    """A folder with the example's files."""
    for name in FILES:
        (tmp_path / name).write_text(example(LAYOUTS, name))
    return tmp_path


def plan(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run("plan", str(folder / "wide.yaml"), *options, TRAINWRIGHT_STORE=folder.as_uri())


def test_the_plan_and_its_timeline_are_as_shown(planned: Path) -> None:
    drawing = planned / "timeline.svg"
    done = plan(planned, "--plot", str(drawing))
    assert done.returncode == 0, done.stderr
    found = " ".join(done.stdout.split())
    for part in example(LAYOUTS, "the plan of wide.yaml").split("\n\n"):
        for line in part.splitlines() if part.startswith("how") else [part]:
            assert " ".join(line.split()) in found
    words = [
        one.text for one in ElementTree.parse(drawing).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert "one step, rank by rank" in words
    assert "1: gpu-b/nvidia-t4-0" in words


def test_the_refusal_is_as_shown(planned: Path) -> None:
    one = ("--set", "devices.min_count=1", "--set", "devices.max_count=1")
    done = plan(planned, *one, "--set", "train.layout=sharded")
    assert done.returncode == 2
    assert example(LAYOUTS, "a refused layout").strip() in done.stderr
