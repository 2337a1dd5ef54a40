"""The example step of architecture.md, installed as a package, in run, DAG, show and page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import doors
import pytest
from airflow_whole import write_job
from command_line import TRAINWRIGHT, process
from doc_pages import ARCHITECTURE, example
from packages import install
from serving import client, serving

from trainwright.tasks import chain
from trainwright.tasks.store import verify

WIRED = """
import json
from airflow.sdk import task
from trainwright.dags.retrain import retrain
tasks = retrain.tasks
wired = {one.task_id: [type(one).__name__, sorted(one.downstream_task_ids)] for one in tasks}
wired["decorator"] = [task.trainwright_count_lines(lambda: {}).operator_class.step]
print("WIRED", json.dumps(wired))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example, installed as a package for the test's child processes."""
    folder = tmp_path / "acme"
    modules = {
        "line_count": example(ARCHITECTURE, "a step"),
        "line_count_operator": example(ARCHITECTURE, "its operator"),
    }
    install(folder, modules, chain.ENTRY_POINTS, {"count_lines": "line_count:STEP"})
    monkeypatch.setenv("PYTHONPATH", str(folder))


def wired() -> Any:
    """The tasks of the DAG `retrain`: class, and downstream tasks."""
    printed = subprocess.run(
        [sys.executable, "-c", WIRED], capture_output=True, text=True, check=True
    ).stdout
    return json.loads(printed.rpartition("WIRED ")[2])


@pytest.mark.usefixtures("package")
def test_a_step_of_another_package_is_run_shown_and_sealed_like_our_own(
    stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_STORE", (stack / "store").as_uri())
    ended = subprocess.run(
        [*TRAINWRIGHT, "run", str(write_job(tmp_path, "counted", 1)), "--json"],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    order = [one.name for one in chain.steps()]
    order.insert(order.index("extract") + 1, "count_lines")
    assert list(document["steps"]) == order

    lines = [line.split() for line in ended.stderr.splitlines()]
    reported = [words[0] for words in lines if words and words[0] in order]
    assert reported == order
    (line,) = (words for words in lines if words[:1] == ["count_lines"])
    run = doors.run_at(document["run"])
    counted = json.loads(run.objects.get("line_count.json"))["lines"]
    assert line[2:] == ["s", str(counted), "lines", "of", "code"]
    assert "line_count.json" in verify(run).files

    shown = json.loads(process("show", run.id, "--json").stdout)
    assert shown["steps"] == document["steps"]
    assert "count_lines" in process("show", run.id, "--all").stdout
    with serving(stack) as address, client(address) as page:
        found = page.get(f"/runs/{run.job_name}/{run.id}").json()
    assert found["steps"] == document["steps"]

    tasks = wired()
    assert tasks["count_lines"] == ["CountLinesOperator", ["estimate"]]
    assert "count_lines" in tasks["extract"][1]
    assert tasks["decorator"] == ["count_lines"]
