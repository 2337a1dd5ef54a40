"""The manual's blocks do what the pages say. Pages that train share a stack and its runs."""

from __future__ import annotations

import ast
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from airflow.sdk import DAG, task
from console_blocks import STORE, blocks_of, difference, plain, run_page
from doc_pages import DOCS, PAGES, README, example, page_id

MARKS = {"", "file", "not run", "exit", "example"}
SLOW = [
    DOCS / name
    for name in (
        "tutorial/first-run.md",
        "how-to/runs.md",
        "how-to/export.md",
        "how-to/commands.md",
        "how-to/estimates.md",
        "tutorial/own-table.md",
        "how-to/predict.md",
        "tutorial/classes.md",
        "tutorial/images-and-model.md",
    )
]
"""Pages with blocks to run, in this order: later ones use the runs of those before."""
NOT_RUN = {
    "README.md": 2,
    "docs/contributing.md": 1,
    "docs/how-to/containers.md": 1,
    "docs/how-to/estimates.md": 1,
    "docs/how-to/gpus.md": 1,
    "docs/how-to/install.md": 1,
    "docs/how-to/kubernetes.md": 3,
    "docs/how-to/layouts.md": 1,
    "docs/how-to/s3-servers.md": 1,
    "docs/how-to/service.md": 1,
    "docs/how-to/slurm.md": 2,
    "docs/tutorial/airflow.md": 2,
    "docs/tutorial/first-run.md": 1,
}
"""How many blocks of each page need what a test can't have."""
pages = pytest.mark.parametrize("page", PAGES, ids=page_id)


@pages
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    blocks = blocks_of(page)
    assert {one.mark for one in blocks} <= MARKS
    runs = [one for one in blocks if one.language == "console" and one.mark in ("", "exit")]
    assert bool(runs) == (page in SLOW)
    for one in blocks:
        if one.language == "python":
            ast.parse(one.text)


def test_few_blocks_are_not_run() -> None:
    found = [(page, one) for page in PAGES for one in blocks_of(page) if one.mark == "not run"]
    assert [page for page, one in found if len(one.value.split()) < 3] == []  # no reason
    assert Counter(page_id(page) for page, _ in found) == NOT_RUN


@pytest.mark.slow
@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize("page", SLOW, ids=page_id)
def test_the_blocks_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_STORE", STORE)
    ended = run_page(page, tmp_path)
    assert ended
    assert [text for text in map(difference, ended) if text is not None] == []


def test_a_line_is_compared_without_figures_ids_and_widths() -> None:
    one = "run  s3://trainwright/runs/x/20261127T105939Z-8f4038   in 1.2 s, 5,100.25 rows"
    assert plain(one) == "run s3://trainwright/runs/x/ID in 0, 0 rows"
    assert plain(one) != plain(one.replace("rows", "files"))


def test_the_readme_shows_what_the_first_run_of_the_manual_prints() -> None:
    shown, manual = (
        [
            plain(line)
            for one in blocks_of(page)
            if one.language == "console"
            for _, lines in one.commands()
            for line in lines
        ]
        for page in (README, DOCS / "tutorial" / "first-run.md")
    )
    steps = shown[: shown.index("…")]
    assert len(steps) == 9
    assert [line for line in steps if line not in manual] == []


def test_the_tutorials_dag_is_that_of_the_readme_which_a_test_runs() -> None:
    page = DOCS / "tutorial" / "airflow.md"
    assert example(page, "foreign DAG") == example(README, "foreign DAG")


def test_the_decorators_make_tasks() -> None:
    with DAG("decorators", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)) as dag:

        @task
        def make_table() -> str:
            return "table.parquet"

        names: dict[str, Any] = {"task": task, "make_table": make_table}
        exec(example(DOCS / "how-to" / "operators.md", "decorators"), names)
    assert set(dag.task_ids) == {"make_table", "train"}


def test_a_source_reads_its_own_data() -> None:
    def recordings(uri: str, part: str) -> list[tuple[torch.Tensor, int]]:
        return [(torch.full((2,), float(len(uri))), len(part)), (torch.zeros(2), 0)]

    names: dict[str, Any] = {"torch": torch, "Recordings": recordings}
    exec(example(DOCS / "how-to" / "own-dataset.md", "a dataset"), names)
    inputs, targets = names["collate"](list(names["dataset"]("uri", "train")))
    assert inputs.tolist() == [[3.0, 3.0], [0.0, 0.0]]
    assert targets.tolist() == [5, 0]
