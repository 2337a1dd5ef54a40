"""The Containerfiles: what they copy and install exists, and they end without root's rights."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "infra" / "images").glob("*.Containerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTALL = (ROOT / "infra" / "images" / "install.sh").read_text()
WORDS = {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "CMD"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Containerfile: word and rest."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def sent(path: str) -> bool:
    """Whether .containerignore lets a file or folder of the repository into the build."""
    rules, found = (ROOT / ".containerignore").read_text().split(), True
    parents = [path, *(str(one) for one in Path(path).parents)]
    for rule in rules:
        if any(fnmatch(one, rule.removeprefix("!")) for one in parents):
            found = rule.startswith("!")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_instruction_is_known_and_what_is_copied_exists(path: Path) -> None:
    found = instructions(path)
    assert {word for word, _ in found} <= WORDS
    stages = {rest.split()[-1] for word, rest in found if word == "FROM" and " AS " in rest}
    for source, target in [rest.rsplit(None, 1) for word, rest in found if word == "COPY"]:
        first, *rest = source.split()
        if first.startswith("--from="):
            assert first.removeprefix("--from=") in stages
            assert rest == [target]
            continue
        for one in [first, *rest]:
            assert (ROOT / one).exists(), one
            assert sent(one), one
    copied = {rest.split()[0] for word, rest in found if word == "COPY"}
    assert {str(one) for one in PROJECT["tool"]["setuptools"]["package-dir"].values()} <= copied


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_extras_exist_and_versions_are_those_of_the_lock_file(path: Path) -> None:
    (install,) = [
        rest for word, rest in instructions(path) if "install.sh" in rest and word == "RUN"
    ]
    (extras,) = re.findall(r"sh /tmp/install.sh ([a-z,]+)", install)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


@pytest.mark.parametrize("index", ["", "https://index.example/cpu"])
def test_only_torch_comes_from_its_index_and_versions_from_the_lock_file(index: str) -> None:
    pip = INSTALL.partition("/opt/trainwright/bin/pip check")[0].replace(
        "/opt/trainwright/bin/pip", "echo"
    )
    done = subprocess.run(
        ["sh", "-c", pip, "sh", "train"],
        env={"PATH": os.environ["PATH"], "TORCH_INDEX": index},
        capture_output=True,
        text=True,
        check=True,
    )
    torch, own = done.stdout.splitlines()
    assert torch.endswith(f"--no-deps {f'--index-url {index} ' if index else ''}torch")
    assert own.endswith("/source[train]")
    assert "index" not in own
    assert all("--constraint /source/infra/requirements.lock" in one for one in (torch, own))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_last_stage_begins_afresh_and_runs_as_a_user_without_rights(path: Path) -> None:
    found = instructions(path)
    last = max(number for number, (word, _) in enumerate(found) if word == "FROM")
    assert found[last][1] == "${BASE}"
    after = found[last:]
    user = next(number for number, (word, _) in enumerate(after) if word == "USER")
    assert after[user][1] == "10001"
    assert not [one for one in after[user + 1 :] if one[0] in ("RUN", "COPY", "USER")]


def test_the_lines_that_images_run_are_a_shells() -> None:
    scripts = [rest for path in FILES for word, rest in instructions(path) if word == "RUN"]
    scripts += [(ROOT / "infra" / "images" / "python.sh").read_text(), INSTALL]
    for script in scripts:
        done = subprocess.run(["sh", "-n", "-c", script], capture_output=True, check=False)
        assert done.returncode == 0, (script, done.stderr)
