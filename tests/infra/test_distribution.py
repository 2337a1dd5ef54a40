"""The distributions: the wheel contains only trainwright, and the sdist builds it."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PARTS = ("dags", "operators", "tasks", "estimator", "infra")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, which is built from a copy of the tree."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def names(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_no_other_top_level_module(built: Path, names: set[str]) -> None:
    assert len(list(built.glob("*.tar.gz"))) == 1
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"trainwright"}
    assert {name.split("/")[1] for name in names if name.startswith("trainwright/")} == set(PARTS)


def test_the_wheel_contains_every_module_and_data_file(names: set[str]) -> None:
    shipped = {".py", ".yaml", ".typed", ".lock", ".html", ".css", ".js"}
    for part in PARTS:
        for path in (ROOT / part).rglob("*"):
            if path.suffix in shipped and "__pycache__" not in path.parts:
                assert f"trainwright/{path.relative_to(ROOT).as_posix()}" in names
        assert f"trainwright/{part}/py.typed" in names
    assert "trainwright/dags/.airflowignore" in names
    assert "trainwright/infra/requirements.lock" in names


def test_the_wheel_contains_the_command_the_provider_and_the_licence(
    built: Path, names: set[str]
) -> None:
    (wheel,) = built.glob("*.whl")
    (points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    declared = zipfile.ZipFile(wheel).read(points).decode()
    assert "trainwright = trainwright.tasks.cli.main:main" in declared
    assert "apache_airflow_provider" in declared
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = [
    one
    for one in map(
        Requirement,
        [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())],
    )
    if one.name != PROJECT["name"]
]


def _lock() -> dict[str, str]:
    lines = (ROOT / "infra" / "requirements.lock").read_text().splitlines()
    exact = {}
    for requirement in map(Requirement, lines):
        (pin,) = requirement.specifier
        assert pin.operator == "==", requirement
        exact[canonicalize_name(requirement.name)] = pin.version
    assert len(exact) == len(lines)
    return exact


def test_the_lock_file_pins_every_package_the_extras_ask_for_within_its_range() -> None:
    pinned = _lock()
    for requirement in ASKED:
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), (
            requirement
        )


def test_the_metadata_asks_for_ranges_and_pins_nothing() -> None:
    for requirement in ASKED:
        operators = {one.operator for one in requirement.specifier}
        assert not operators & {"==", "==="}, requirement
        if not requirement.name.startswith("types-"):
            assert ">=" in operators, f"{requirement} has no oldest version"


def test_the_metadata_and_the_makefile_name_the_same_versions_of_python() -> None:
    prefix = "Programming Language :: Python :: 3."
    minors = [
        int(one.removeprefix(prefix)) for one in PROJECT["classifiers"] if one.startswith(prefix)
    ]
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert [minor for minor in range(8, 20) if allowed.contains(f"3.{minor}.5")] == minors
    makefile = (ROOT / "Makefile").read_text()
    assert f"(3, {minors[0]}) <= sys.version_info < (3, {minors[-1] + 1})" in makefile
