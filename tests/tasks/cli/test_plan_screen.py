"""The output of `plan` for a person."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import doors
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pipeline_cases import pipeline_plan_and_estimate
from plans import NOON, curve
from plans import plan as planned
from rich.console import Console

from trainwright.estimator.curves import Affine, DeviceCurve
from trainwright.tasks import progress
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.cli.screens import console
from trainwright.tasks.cli.screens.plans import plan_screen
from trainwright.tasks.cli.screens.quantities import column
from trainwright.tasks.leases.ledger import Heartbeat, Holder
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.documents import parsed
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool, load_pool
from trainwright.tasks.units import plain

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
    row = next(line for line in shown.stdout.splitlines() if "far/nvidia-t4-0" in line)
    assert "datasheet" in row
    printed = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=200, check=True
    ).stdout
    assert [device["mode"] for device in json.loads(printed)["devices"]] == ["datasheet"]


def test_notices_are_shown_once_while_a_command_works_and_not_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with console.working("planning"):
        progress.emit("notice", message="measuring this machine")
        progress.emit("notice", message="measuring this machine")
    progress.emit("notice", message="much later")
    shown = capsys.readouterr().err
    assert shown.count("note       measuring this machine") == 1
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
                [*command, "--all"],
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
    plan_screen.show_plan(plan, everything=True)
    lines = capsys.readouterr().out.splitlines()
    assert plan.not_exceeded is not None
    assert any(f"in {plan.accumulation} micro-batches" in line for line in lines)
    assert any("(95 %)" in line for line in lines)
    assert re.match(
        r"1 CPU, 512 samples in \d+ micro-batches, about [^;]*s, at most [^;]*s \(95 %\); "
        r"deadline 1 h; budget 7\.25 units ",
        " ".join(" ".join(lines).split()),  # terminals fold it
    )
    rows = {
        words[0]: (words[1], float(words[-1]))
        for words in map(str.split, lines)
        if len(words) > 2 and words[0] in ("duration,", "deadline,", "budget,")
    }
    unit, shown = rows["duration,"]
    assert shown * {"s": 1, "min": 60}[unit] == pytest.approx(
        plan.not_exceeded.duration_s, rel=0.01
    )
    assert (rows["deadline,"], rows["budget,"]) == (("h", 1.0), ("units", 7.25))


def shown(plan: Plan, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a plan's screen, with single spaces."""
    plan_screen.show_plan(plan, everything=True)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


MIXED: dict[str, Any] = {
    "hosts": [
        {"name": "a", "devices": [{"type": "cpu", "cores": 1.0, "count": 2}]},
        {
            "name": "b",
            "address": "10.0.0.1",
            "devices": [{"type": "cpu", "cores": 0.5}, {"type": "nvidia-t4"}],
            "available": "11:30-18:30",
        },
    ],
    "prices": {"cpu": "1/h", "energy": "0.25/kWh"},
    "currency": "EUR",
}
"""A pool with a window, and a type without a price."""


def mixed(**job: Any) -> Plan:
    t4 = curve(1.0).model_copy(update={"device_type": "nvidia-t4", "cores": None})
    return planned(MIXED, curves=[curve(1.0), curve(0.5), t4], now=NOON, **job)


def test_a_plan_begins_with_its_answer_and_fits_a_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = mixed()
    plan_screen.show_plan(plan, everything=False)
    lines = capsys.readouterr().out.splitlines()
    assert "samples, about" in lines[0]
    assert lines[-1] == "more: the same command with --all, or --json"
    assert len(lines) <= 40
    assert len(shown(plan, capsys)) > len(lines)


def test_the_table_has_prices_in_the_pools_currency_with_rent_and_energy_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = mixed(objective={"minimize": "cost", "budget": 2.0}, train={"epochs": 3000})
    found = made.predicted
    assert found is not None
    assert found.cost is not None
    assert found.rent is not None
    assert found.energy_cost is not None
    assert found.energy_j is not None
    assert found.energy_cost.median == pytest.approx(found.energy_j.median * 0.25 / 3.6e6)
    for end in ("median", "low", "high"):
        parts = getattr(found.rent, end) + getattr(found.energy_cost, end)
        assert getattr(found.cost, end) == pytest.approx(parts)
    assert {one.price_per_hour for one in made.devices} == {1.0}
    lines = shown(made, capsys)
    rows = {line.split(",")[0]: line for line in lines if "," in line}
    for name, value in (("cost", found.cost), ("rent", found.rent), ("energy", found.energy_cost)):
        (row,) = (line for line in lines if line.startswith(f"{name}, EUR"))
        assert float(row.split()[2]) == pytest.approx(value.median, rel=0.01)
    assert rows["budget"] == "budget, EUR 2.00"
    assert any("EUR/h" in line for line in lines)
    assert "left out 1 x nvidia-t4: the pool has no price" in lines


def test_the_table_has_hosts_windows_and_the_shares_of_each_devices_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = mixed(devices={"types": ["cpu"], "min_count": 3}, train={"global_batch_size": 100})
    assert made.predicted is not None
    for one in made.devices:
        shares = one.step_shares
        assert shares is not None
        assert min(shares.compute, shares.wait, shares.communicate) >= 0
        assert shares.compute + shares.wait + shares.communicate == pytest.approx(1)
        step_s = made.predicted.step_time_s.median
        assert shares.compute * step_s == pytest.approx(one.step_time_s.median)
    assert min(one.step_shares.wait for one in made.devices if one.step_shares) == 0
    assert {one.host: one.available for one in made.devices} == {"a": None, "b": "11:30-18:30"}
    assert made.window_s == 6.5 * 3600
    lines = shown(made, capsys)
    assert any(line.endswith("11:30-18:30") for line in lines if line.startswith("b/cpu-0"))
    assert any(line.endswith("always") for line in lines if line.startswith("a/cpu-0"))
    assert "hosts' windows, h 6.50" in lines
    alone = mixed(devices={"hosts": ["a"], "max_count": 1}, train={"global_batch_size": 100})
    assert alone.window_s is None
    lines = shown(alone, capsys)
    assert not [line for line in lines if "window" in line or "always" in line]
    assert any(line.startswith("a/cpu-0 100.0 0.0 0.0 1.00") for line in lines)


def test_other_global_batches_are_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    made = mixed(train={"batch_bounds": [8, 64], "noise_scale": 100.0})
    assert made.searched is not None
    assert made.searched.global_batch_sizes == [8, 16, 32, 64]
    lines = shown(made, capsys)
    first = next(place for place, line in enumerate(lines) if line.startswith("global batches, "))
    table = lines[first + 3 : first + 7]
    for size, row in zip(made.searched.global_batch_sizes, table, strict=True):
        assert f" {size}: " in row
        assert ("*" in row) == (size == made.global_batch_size)
    single = mixed(train={"global_batch_size": 64})
    assert not [line for line in shown(single, capsys) if line.startswith("global batches, ")]


def test_the_plan_says_what_was_searched_and_how_much_better_another_choice_can_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = mixed(objective={"minimize": "energy"}, train={"global_batch_size": 64})
    lines = shown(made, capsys)
    assert made.searched is not None
    assert made.searched.devices == 4
    assert made.searched.device_sets == 3 * 2 * 2 - 1
    assert "devices 4, in 11 different sets" in lines
    assert "global batches 64" in lines
    assert "layouts data-parallel" in lines
    text = " ".join(lines)
    assert "exact: at a global batch of 64, no other data parallel plan needs less energy" in text
    bounded = made.model_copy(update={"search": "bounded", "gap": 0.00417})
    text = " ".join(shown(bounded, capsys))
    assert "exact" not in text
    assert "another data parallel plan could need up to 0.42 % less energy" in text
    both = " ".join(shown(made.model_copy(update={"layouts_gap": 0.25}), capsys))
    assert (
        "no other data parallel plan needs less energy, and one of another layout could need"
        in both
    )
    assert "could need up to 25 % less energy; found in" in both
    neither = " ".join(shown(made.model_copy(update={"layouts_gap": 0.0}), capsys))
    assert "and one of another layout is no better either; found in" in neither
    laid = Layout(name="sharded", pipelines=[])
    other = bounded.model_copy(update={"layout": laid, "layouts_gap": 0.00417})
    text = " ".join(shown(other, capsys))
    assert "another plan of any layout could need up to 0.42 % less energy; found in" in text
    earlier = made.model_copy(update={"searched": None})
    assert "searched" not in " ".join(shown(earlier, capsys))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 9))
def test_device_sets_are_all_choices_of_so_many_devices(
    counts: list[int], least: int, more: int
) -> None:
    """Each core count is a kind; the number of sets is compared with their enumeration."""
    kinds = [
        {"type": "cpu", "cores": float(place), "count": count}
        for place, count in enumerate(counts, start=1)
    ]
    least = min(least, sum(counts))
    made = planned(
        {"hosts": [{"name": "a", "devices": kinds}]},
        devices={"min_count": least, "max_count": least + more},
        train={"global_batch_size": 16},
    )
    choices = itertools.product(*(range(count + 1) for count in counts))
    assert made.searched is not None
    assert made.searched.device_sets == sum(least <= sum(one) <= least + more for one in choices)


def test_a_huge_number_of_device_sets_is_not_counted() -> None:
    kinds = [{"type": "cpu", "cores": float(place), "count": 99} for place in range(1, 9)]
    for limits in ({}, {"max_count": 500}):
        made = planned(
            {"hosts": [{"name": "a", "devices": kinds}]},
            devices=limits,
            train={"global_batch_size": 1000},
        )
        assert made.searched is not None
        assert made.searched.device_sets is None


def test_a_plan_of_an_earlier_version_is_read() -> None:
    document = mixed(train={"global_batch_size": 64}).model_dump(mode="json")
    for field in ("searched", "currency", "window_s"):
        del document[field]
    for device in document["devices"]:
        for field in ("step_shares", "price_per_hour", "available"):
            del device[field]
    for field in ("rent", "energy_cost"):
        del document["predicted"][field]
    read = parsed(Plan, json.dumps(document).encode(), "plan.json")
    assert (read.searched, read.currency, read.devices[0].step_shares) == (None, None, None)


@given(st.lists(st.floats(1e-9, 1e9) | st.none(), min_size=1, max_size=8))
def test_a_column_has_one_unit_and_the_same_number_of_decimals_in_each_row(
    values: list[float | None],
) -> None:
    unit, texts = column(values, ((60.0, "min"), (1.0, "s"), (1e-3, "ms")))
    scale = {"min": 60.0, "s": 1.0, "ms": 1e-3}[unit]
    decimals = {len(text.partition(".")[2]) for text in texts if text != "-"}
    assert len(decimals) <= 1
    for value, text in zip(values, texts, strict=True):
        assert (text == "-") == (value is None)
    known = sorted(value for value in values if value is not None)
    if known:
        half = 0.51 * 10.0 ** -decimals.pop()
        assert half <= max(5.1e-3 * known[len(known) // 2] / scale, 0.51e-9)
        assert half <= max(0.51 * known[0] / scale, 0.51e-9)
        for value, text in zip(values, texts, strict=True):
            assert value is None or float(text) == pytest.approx(value / scale, abs=half, rel=1e-9)


def test_the_row_of_a_quantity_has_the_unit_and_the_decimals_of_its_median() -> None:
    units = ((60.0, "min"), (1.0, "s"))
    assert column([25.14, 8.04, 92.28, 69.0], units, 25.14) == (
        "s",
        ["25.1", "8.0", "92.3", "69.0"],
    )
    assert column([25.14, 0.0012], units, 25.14) == ("s", ["25.140", "0.001"])
    assert column([None, 12.0], units, None) == ("s", ["-", "12.0"])


def test_a_pipelines_plan_says_what_was_searched_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    made, _ = pipeline_plan_and_estimate()
    text = " ".join(" ".join(shown(made, capsys)).split())
    assert made.layout is not None
    parts = made.accumulation
    assert f"micro-batches {parts}: the best of the numbers that were tried" in text
    assert f"schedules {made.layout.schedule}: the best" in text
    assert "stages cut between the model's 8 units" in text
    assert "more would be slower" not in text
    assert "every combination" not in text
    assert "a stage computes all samples of its pipeline" in text
    assert f"another plan of any layout could be up to {plain(100 * made.gap, 2)} % faster" in text
    unknown = made.model_copy(update={"gap": 1.0})
    text = " ".join(" ".join(shown(unknown, capsys)).split())
    assert "how much better another plan of any layout can be is not known" in text
    for one in made.devices:
        assert one.step_shares is not None
        assert one.step_shares.communicate == 0
        assert one.step_shares.compute + one.step_shares.wait == pytest.approx(1)


def test_a_terminal_gets_frames_that_fit_and_a_pipe_gets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def printed(*, terminal: bool) -> list[str]:
        text = io.StringIO()
        screen = Console(file=text, force_terminal=terminal, width=40, color_system=None)
        monkeypatch.setattr(console, "out", screen)
        console.table("runs", ("job", "metric"), [("digits", "0.99 " * 20)], right=(1,))
        return [line for line in text.getvalue().splitlines() if line.strip()]

    framed, bare = printed(terminal=True), printed(terminal=False)
    assert (framed[1][0], framed[1][-1]) == ("╭", "╮")
    assert {len(line) for line in framed[1:]} == {40}
    assert not any("│" in line or "─" in line for line in bare)
