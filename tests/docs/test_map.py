"""The map shows every room, and every file that the documentation names exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from doc_pages import ARCHITECTURE, BENCHMARKS, PAGES, ROOT, code, page_id, section

PACKAGES = ("dags", "operators", "tasks", "estimator", "infra")
_MADE = "infra/stack/secrets/"
"""`make stack-secrets` makes these files."""
_PATH = re.compile(rf"(?<![\w/])((?:{'|'.join((*PACKAGES, 'tests', 'docs'))})/[\w./-]*)")
_MODULE = re.compile(rf"\btrainwright\.((?:{'|'.join(PACKAGES)})(?:\.\w+)*)")
pages = pytest.mark.parametrize("page", PAGES, ids=page_id)


def rooms() -> set[str]:
    """The package folders of the tree."""
    inits = (path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py"))
    return {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in inits}


def test_every_room_is_on_the_map_once_and_every_room_of_the_map_exists() -> None:
    shown = Counter(re.findall(r"^\| `([^`]+)` \|", section(ARCHITECTURE, "Map"), re.MULTILINE))
    assert set(shown) == rooms()
    assert set(shown.values()) == {1}


def test_each_room_says_what_is_in_it() -> None:
    silent = [
        room
        for room in rooms()
        if ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) is None
    ]
    assert silent == []


def test_each_room_names_the_modules_to_read_first() -> None:
    silent = []
    for room in rooms():
        text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
        named = {name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", text)}
        modules = {path.stem for path in (ROOT / room).glob("*.py")}
        folders = [path.name for path in (ROOT / room).iterdir() if path.is_dir()]
        if not (named & modules or any(f"{name}/" in text for name in folders)):
            silent.append(room)
    assert silent == []


def test_no_two_test_modules_have_one_name() -> None:
    """Pytest imports test modules by their base name, so two of one name can't be collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_name_of_a_class_or_an_alias_means_two_things() -> None:
    """Aliases of one name may repeat in several modules, with the same definition."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            module = ast.parse(path.read_text())
            for node in ast.walk(module):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name.lstrip("_"), set()).add(f"class in {path}")
            for node in module.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    name = node.targets[0].id.lstrip("_")
                    if re.fullmatch(r"[A-Z][a-z]\w*", name):
                        found.setdefault(name, set()).add(ast.unparse(node.value))
    assert {name: meanings for name, meanings in found.items() if len(meanings) > 1} == {}


def test_a_module_name_is_used_again_only_for_a_steps_operator_and_its_dags() -> None:
    names = Counter(
        path.name
        for package in ("tasks", "estimator", "infra")
        for path in (ROOT / package).rglob("*.py")
        if path.name not in ("__init__.py", "step.py")
    )
    twice = {name for name, count in names.items() if count > 1}
    assert twice == {"errors.py"}  # the estimator's root of all errors, and the tasks' tree


@pages
def test_every_path_in_the_documentation_exists(page: Path) -> None:
    named = {path.rstrip(".") for text in code(page.read_text()) for path in _PATH.findall(text)}
    there = {path for path in named if path.startswith(_MADE) or (ROOT / path).exists()}
    assert sorted(named - there) == []


@pages
def test_every_module_in_the_documentation_exists(page: Path) -> None:
    named = set(_MODULE.findall(page.read_text()))
    assert [name for name in sorted(named) if not _is_there(name)] == []


def test_every_name_that_follows_a_file_is_defined_in_it() -> None:
    named = re.findall(r"`([\w/]+\.py)`, `(\w+)`", ARCHITECTURE.read_text())
    assert named
    assert [(file, name) for file, name in named if name not in _defined(ROOT / file)] == []


def test_every_command_of_the_benchmarks_exists() -> None:
    missing, folder = [], None
    for line in BENCHMARKS.read_text().splitlines():
        if below := re.search(r"under `(tests/benchmarks/(?:\w+/)?)`", line):
            folder = ROOT / below[1]
        for script in re.findall(r"`(\w+\.py)\b", line):
            assert folder is not None
            missing += [] if (folder / script).is_file() else [script]
    assert missing == []


def _is_there(name: str) -> bool:
    """Whether a dotted name is a package, a module, or a name that a module defines."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    return path.parent.with_suffix(".py").is_file() and path.name in _defined(
        path.parent.with_suffix(".py")
    )


def _defined(file: Path) -> set[str]:
    """The names that a module defines at its top level."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found
