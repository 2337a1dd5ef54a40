"""A step's room imports from other steps' rooms only what this table declares."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from doc_pages import ROOT

TASKS = ROOT / "tasks"
DECLARED: dict[str, set[str]] = {
    "validate": set(),
    "recommend": {"allocate.preview", "extract", "train.rank.optimizer"},
    "extract": set(),
    "estimate": set(),
    "allocate": {
        "estimate.finished_runs",
        "estimate.memory_limits",
        "estimate.pool_estimate",
        "estimate.step",
        "extract",
    },
    "train": {
        "allocate.acquire",
        "allocate.actions.schedules",
        "allocate.actions.stage_parts",
        "allocate.layouts.permitted",
        "allocate.plan.split",
        "allocate.replan.next_layout",
        "allocate.step",
        "extract",
    },
    "search_lr": {
        "allocate.acquire",
        "allocate.step",
        "train",
        "train.step",
        "train.worker.lr_curve",
        "train.worker.lr_trials",
    },
    "store": {"estimate.finished_runs", "train.checkpoint.fence", "train.checkpoint.files"},
    "promote": {"store"},
    "inference": {"store"},
    "export": {"promote", "store", "train.rank.validation_metrics"},
    "analyze": {
        "allocate.layouts.words",
        "allocate.recompute.recomputing_curves",
        "allocate.timeline.measured_step",
        "allocate.timeline.simulated_plan",
        "allocate.timeline.timeline_svg",
        "search_lr.plot",
        "store",
        "validate.rejection_page",
    },
}


def test_a_steps_room_imports_only_what_it_declares() -> None:
    found = {room: set(_imported(room)) for room in DECLARED}
    assert found == DECLARED


def test_the_table_has_every_step() -> None:
    steps = {path.parent.name for path in TASKS.glob("*/step.py")}
    assert steps < set(DECLARED)
    assert all((TASKS / room).is_dir() or (TASKS / f"{room}.py").is_file() for room in DECLARED)


def _imported(room: str) -> Iterator[str]:
    """The modules of other steps' rooms that a room's modules import, anywhere in their code."""
    for path in (TASKS / room).rglob("*.py") if (TASKS / room).is_dir() else [TASKS / f"{room}.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            for name in _names(node):
                module = name.removeprefix("trainwright.tasks.")
                if module != name and module.split(".")[0] in DECLARED.keys() - {room}:
                    yield module


def _names(node: ast.AST) -> Iterator[str]:
    """The modules that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        for one in node.names:
            inner = f"{node.module}.{one.name}"
            yield inner if _is_module(inner) else node.module


def _is_module(name: str) -> bool:
    path = ROOT / Path(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()
