"""`trainwright doctor` says what is there, what is wrong, and how to mend it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.tasks.cli.commands import doctor_command
from trainwright.tasks.settings import Settings

PARTS = ["Python", "packages", "compiler", "Horovod", "store", "ledger", "disk", "GPU"]


def doctor(home: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainwright.tasks.cli.main", "doctor", *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"COLUMNS": "80", "TRAINWRIGHT_HOME": str(home)} | environment,
    )


def test_every_part_has_a_line_and_nothing_is_made(tmp_path: Path) -> None:
    home = tmp_path / "fresh"
    done = doctor(home, "--json", TRAINWRIGHT_STORE=(tmp_path / "store").as_uri())
    document = json.loads(done.stdout)
    assert [one["part"] for one in document["parts"]] == PARTS
    wrong = [one for one in document["parts"] if one["state"] == "wrong"]
    assert all(one["mend"] for one in wrong)
    assert (document["healthy"], done.returncode) == (not wrong, 4 if wrong else 0)
    assert not home.exists()
    assert "Traceback" not in done.stderr


def test_what_is_wrong_is_shown_with_the_way_to_mend_it_and_exits_with_4(tmp_path: Path) -> None:
    away = {"TRAINWRIGHT_STORE": "s3://bucket", "TRAINWRIGHT_S3_ENDPOINT": "http://127.0.0.1:1"}
    done = doctor(tmp_path, **away, TRAINWRIGHT_S3_ACCESS_KEY="a", TRAINWRIGHT_S3_SECRET_KEY="b")
    assert done.returncode == 4
    assert "to mend" in done.stdout
    assert "127.0.0.1:1" in done.stdout


def test_absent_packages_are_named_with_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_command, "_EXTRAS", {"airflow": ("no_such_package_here",)})
    settings = Settings({"TRAINWRIGHT_HOME": str(tmp_path)})
    found = {one.part: one for one in doctor_command.findings(settings)}
    assert found["packages"].state == "wrong"
    assert "pip install '.[airflow]'" in found["packages"].mend
