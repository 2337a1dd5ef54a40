"""The output of `plan` for a person."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import doors
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.curves import Affine, DeviceCurve
from trainwright.tasks import progress
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.cli.screens import console, plan_screen
from trainwright.tasks.leases.ledger import Heartbeat, Holder
from trainwright.tasks.runs.artefacts import DataSchema, Estimate
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool, load_pool

JOB = {
    "name": "j",
    "data": {"uri": "builtin:digits"},
    "train": {"global_batch_size": 64},
    "model": {"source": str(Path(__file__).parents[3] / "dags" / "jobs" / "cnn.py")},
}


def test_each_devices_row_names_the_mode_of_its_prediction(tmp_path: Path) -> None:
    pool, job = tmp_path / "pool.yaml", tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(JOB))
    host = {"name": "far", "address": "10.0.0.1", "devices": [{"type": "nvidia-t4"}]}
    pool.write_text(yaml.safe_dump({"name": "p", "hosts": [host]}))
    command = [
        sys.executable,
        "-m",
        "trainwright.tasks.cli.main",
        "plan",
        str(job),
        "--pool",
        str(pool),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert shown.returncode == 0, shown.stderr
    (row,) = (line for line in shown.stdout.splitlines() if "far/nvidia-t4-0" in line)
    assert "datasheet" in row
    printed = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=200, check=True
    ).stdout
    assert [device["mode"] for device in json.loads(printed)["devices"]] == ["datasheet"]


def test_notices_are_shown_while_a_command_works_and_not_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with console.working("planning"):
        progress.emit("notice", message="measuring this machine")
    progress.emit("notice", message="much later")
    shown = capsys.readouterr().err
    assert "note       measuring this machine" in shown
    assert "much later" not in shown


def test_the_plan_fits_80_columns_with_whole_words_and_names_the_holders(
    home: Path, tmp_path: Path
) -> None:
    pool, job = tmp_path / "pool.yaml", tmp_path / "job.yaml"
    hosts = [
        {
            "name": "a-host-of-a-rather-long-name",
            "address": "10.0.0.1",
            "devices": [{"type": "nvidia-a100-80gb", "count": 2}],
        },
        {"name": "far", "address": "10.0.0.2", "devices": [{"type": "nvidia-t4", "count": 2}]},
    ]
    pool.write_text(
        yaml.safe_dump(
            {
                "name": "p",
                "hosts": hosts,
                "prices": {"nvidia-t4": "0.3/h", "nvidia-a100-80gb": "2/h"},
            }
        )
    )
    job.write_text(yaml.safe_dump(JOB | {"objective": {"minimize": "time"}}))
    taken = load_pool(pool).devices()[0]
    other = "file:///store/runs/other/1"
    doors.ledger().take([taken.resource], Holder("somebody", os.getpid()), other)
    command = [
        sys.executable,
        "-m",
        "trainwright.tasks.cli.main",
        "plan",
        str(job),
        "--pool",
        str(pool),
    ]
    with Heartbeat(doors.ledger(), other, [taken.resource], holder="somebody"):
        printed = subprocess.run(
            [*command, "--json"], capture_output=True, timeout=200, check=True
        ).stdout
        shown = {
            columns: subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=200,
                check=True,
                env=os.environ | {"COLUMNS": str(columns)},
            ).stdout
            for columns in (80, 120)
        }
    doors.ledger().release(other)
    document = json.loads(printed)
    (held,) = document["held"]
    assert (held["id"], held["holder"], held["run"]) == (taken.id, "somebody", other)
    words = {word for one in document["alternatives"][:6] for word in one["reason"].split()}
    for columns, text in shown.items():
        assert max(map(len, text.splitlines())) <= columns
        assert words <= set(text.split())
        assert "as if these were free too" in " ".join(text.split())
        assert "somebody, for" in text
        assert re.search(r"\d\d:\d\d:\d\d UTC", text)


def test_a_plan_shows_its_micro_batches_and_each_limit_beside_its_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    curve = DeviceCurve(
        device_type="cpu",
        cores=1.0,
        mode="calibrated",
        coverage=1.0,
        step_time_s=Affine(fixed=2e-3, per_sample=1e-3),
        low_factor=0.9,
        high_factor=1.2,
        peak_memory_bytes=Affine(fixed=1e8, per_sample=1e6),
        memory_safe_factor=1.25,
        memory_limit_bytes=4e8,
        idle_w=5,
        load_w=20,
        energy_source="datasheet",
    )
    host = {"name": "a", "devices": [{"type": "cpu", "cores": 1.0}]}
    schema = DataSchema(
        task="custom",
        rows=1200,
        train_rows=1000,
        validation_rows=200,
        inputs={},
        input_dtypes={},
        target="label",
        target_dtype="",
        sha256="",
    )
    limits = {"deadline": "1h", "budget": 7.25, "confidence": 0.95}
    plan = make_plan(
        Job.model_validate(JOB | {"train": {"global_batch_size": 512}, "objective": limits}),
        Pool.model_validate({"name": "p", "hosts": [host], "prices": {"cpu": "1/h"}}),
        Estimate(mode="calibrated", gradient_bytes=1e6, curves=[curve]),
        schema,
    )
    plan_screen.show_plan(plan)
    lines = capsys.readouterr().out.splitlines()
    assert plan.not_exceeded is not None
    assert any(f"in {plan.accumulation} micro-batches" in line for line in lines)
    assert any("95 % sure" in line for line in lines)
    rows = {
        words[0]: (words[1], float(words[-1]))
        for words in map(str.split, lines)
        if len(words) > 2 and words[0] in ("duration,", "deadline,", "budget,")
    }
    unit, shown = rows["duration,"]
    assert shown * {"s": 1, "min": 60}[unit] == pytest.approx(
        plan.not_exceeded.duration_s, rel=0.01
    )
    assert (rows["deadline,"], rows["budget,"]) == (("h", 1.0), ("currency", 7.25))


@given(st.lists(st.floats(1e-9, 1e9) | st.none(), min_size=1, max_size=8))
def test_a_column_has_one_unit_and_the_same_number_of_decimals_in_each_row(
    values: list[float | None],
) -> None:
    unit, texts = plan_screen.column(values, ((60.0, "min"), (1.0, "s"), (1e-3, "ms")))
    scale = {"min": 60.0, "s": 1.0, "ms": 1e-3}[unit]
    decimals = {len(text.partition(".")[2]) for text in texts if text != "-"}
    assert len(decimals) <= 1
    for value, text in zip(values, texts, strict=True):
        assert (text == "-") == (value is None)
        if value is not None:
            assert float(text) * scale == pytest.approx(value, rel=5e-3, abs=0.6e-6 * scale)
