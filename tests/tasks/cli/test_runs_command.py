"""`trainwright runs`: filters, order of columns, JSON; completion and near names of commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import doors
import pytest
from finished_run import begin_run, write_outcome

COMMAND = [sys.executable, "-m", "trainwright.tasks.cli.main"]


def command(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"COLUMNS": "80"} | environment,
    )


@pytest.fixture
def store(home: Path, tmp_path: Path) -> str:
    uri = (tmp_path / "store").as_uri()
    begin_run(uri, "old", 1).note(state="failed", step="train")
    trained = begin_run(uri, "old", 2, target={"metric": "f1", "value": 0.8})
    write_outcome(trained, metrics={"accuracy": 0.9, "loss": 0.4, "f1": 0.875})
    trained.note(state="success", step=None)
    between = begin_run(uri, "between", 2)
    between.note(state="running", step=None)
    between.work_path.mkdir(parents=True)
    recent = datetime.now(UTC) - timedelta(minutes=10)
    template = begin_run(uri, "young", 3)
    young = doors.run_at(f"{uri}/runs/young/{recent:%Y%m%dT%H%M%SZ}-abcdef")
    for name in ("job.json", "status.json"):
        young.objects.put(name, template.objects.get(name))
    return uri


@pytest.mark.parametrize(
    ("args", "jobs"),
    [
        ([], ["young", "young", "between", "old", "old"]),
        (["old"], ["old", "old"]),
        (["--state", "failed"], ["old"]),
        (["--state", "failed", "--state", "success"], ["old", "old"]),
        (["--state", "left"], ["between"]),
        (["--since", "1h"], ["young"]),
        (["--since", "1h", "--state", "failed"], []),
    ],
)
def test_runs_are_filtered_by_job_state_and_age(
    store: str, args: list[str], jobs: list[str]
) -> None:
    done = command("runs", *args, "--store", store, "--json")
    assert [one["job"] for one in json.loads(done.stdout)["runs"]] == jobs


def test_in_80_columns_job_and_state_come_first_and_nothing_is_cut_off(store: str) -> None:
    lines = command("runs", "--store", store).stdout.splitlines()
    assert lines[1].split() == ["job", "state", "result", "age", "took", "run"]
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if "f1 0.8750" in line]  # the target of its job
    assert [line.split()[-1][-6:] for line in lines[2:] if line.split()] == ["abcdef"] * 5
    assert all(line.split()[0] in ("young", "between", "old") for line in lines[2:] if line.split())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["runs", "--state", "done"], "--state: got 'done'; allowed: running, success, failed"),
        (["runs", "--since", "soon"], "--since: got 'soon'; allowed: a number with its unit"),
        (["runs", "--watch", "--json"], "--watch: got --json too"),
        (["trian", "job.yaml"], "No such command 'trian'. Did you mean 'train'"),
        (["runs", "--sinse", "1h"], "No such option: --sinse (Possible options: --json, --since)"),
    ],
)
def test_a_wrong_option_or_command_is_one_line(home: Path, args: list[str], says: str) -> None:
    done = command(*args)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_shell_completes_commands() -> None:
    words = {"COMP_WORDS": "trainwright cali", "COMP_CWORD": "1"}
    done = command(_TRAINWRIGHT_COMPLETE="complete_bash", **words)
    assert done.stdout.split() == ["calibrate"]
