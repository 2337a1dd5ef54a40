"""Validation with the real Great Expectations, in its process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import doors
import numpy as np
import psutil
import pytest
from command_line import run

from trainwright.tasks.data.dataset import load
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.runs.artefacts.validation import Expectation, Validation
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.job import Job
from trainwright.tasks.validate.check import failure_line, validate
from trainwright.tasks.validate.step import validate_data, validate_job

DIGITS = DataSpec(uri="builtin:digits")


@pytest.fixture(scope="module")
def digits() -> Validation:
    return validate(DIGITS)


def table(path: Path, changes: dict[int, str] | None = None, rows: int = 40) -> str:
    """Write a csv with columns a, colour, label; `changes` replaces rows by number."""
    lines = [
        f"{number}.5,{'red' if number % 3 else 'blue'},{'yes' if number % 2 else 'no'}"
        for number in range(rows)
    ]
    for number, line in (changes or {}).items():
        lines[number] = line
    path.write_text("a,colour,label\n" + "".join(f"{line}\n" for line in lines))
    return str(path)


def failed(validation: Validation) -> dict[tuple[str, str | None], Expectation]:
    return {
        (entry.expectation, entry.column): entry
        for entry in validation.expectations
        if not entry.success
    }


def test_a_metric_that_the_inferred_task_lacks_is_refused(tmp_path: Path) -> None:
    job = Job.model_validate(
        {
            "name": "small",
            "data": {"uri": table(tmp_path / "a.csv")},
            "promotion": {"only_if_better": "r2"},
        }
    )
    with pytest.raises(BadInput) as caught:
        validate_job(job, doors.settings())
    assert str(caught.value) == (
        "job: promotion.only_if_better: got 'r2'; "
        "allowed for tabular-classification: accuracy, loss, f1, auc, log_loss; "
        "or clear promotion.only_if_better"
    )


def test_the_digits_meet_their_inferred_suite(digits: Validation) -> None:
    assert digits.success
    assert (digits.suite_source, digits.checked_rows) == ("inferred", 1797)
    assert digits.data == load(DIGITS).schema
    assert failed(digits) == {}
    named = {entry["type"] for entry in digits.suite}
    assert {"expect_table_row_count_to_be_between", "expect_column_values_to_be_in_set"} <= named
    assert digits.great_expectations["statistics"]["evaluated_expectations"] == len(digits.suite)


@pytest.mark.parametrize(
    "column",
    [
        [1763900000.0 + place for place in range(40)],
        [1763900000 + place for place in range(40)],
        [0.1] * 40,
        [1 / 3] * 40,
        [1234567.891 + 1e-9 * place for place in range(40)],
        [-5e-324, *[0.0] * 39],
        [1e38, -1e38] * 20,
        [3e38] * 40,
    ],
)
def test_any_data_meets_its_inferred_suite(tmp_path: Path, column: list[float]) -> None:
    lines = [f"{value!r},{'ab'[place % 2]}" for place, value in enumerate(column)]
    (tmp_path / "data.csv").write_text("\n".join(["x,label", *lines]) + "\n")
    found = validate(DataSpec(uri=str(tmp_path / "data.csv")))
    assert found.success, failed(found)


@pytest.mark.parametrize("value", [1e300, 1.7e308])
def test_numbers_too_large_for_training_fail_the_validation_without_an_error(
    tmp_path: Path, value: float
) -> None:
    lines = [f"{value * (-1) ** place!r},{'ab'[place % 3 % 2]}" for place in range(40)]
    (tmp_path / "data.csv").write_text("\n".join(["x,label", *lines]) + "\n")
    found = validate(DataSpec(uri=str(tmp_path / "data.csv")))
    assert list(failed(found)) == [("data_to_be_usable_for_training", None)]


def test_a_validation_can_be_written_as_json(digits: Validation) -> None:
    assert (
        Validation.model_validate(
            json.loads(json.dumps(digits.model_dump(mode="json"), allow_nan=False))
        )
        == digits
    )


def test_a_kept_suite_names_images_with_an_unknown_label_or_without_a_value(
    digits: Validation, tmp_path: Path
) -> None:
    data = load(DIGITS)
    images, labels = data.inputs["inputs"].copy(), data.targets.copy()
    labels[[7, 9]] = 11
    images[3, 0, 2, 2] = np.nan
    np.savez(tmp_path / "digits.npz", images=images, label=labels)
    validation = validate(DataSpec(uri=str(tmp_path / "digits.npz")), kept_suite=digits.suite)
    assert not validation.success
    assert (validation.suite_source, validation.suite, validation.data) == (
        "kept",
        digits.suite,
        None,
    )
    label = failed(validation)["expect_column_values_to_be_in_set", "label"]
    assert (label.unexpected_count, [row["index"] for row in label.sample_rows]) == (2, [7, 9])
    assert {row["label"] for row in label.sample_rows} == {11}
    pixels = failed(validation)["expect_column_values_to_be_between", "nan_count"]
    assert (
        pixels.unexpected_count,
        pixels.sample_rows[0]["index"],
        pixels.sample_rows[0]["nan_count"],
    ) == (1, 3, 1)
    line = failure_line(validation)
    assert "expect_column_values_to_be_in_set(label): 2 rows, the first is row 7" in line
    assert "\n" not in line


def test_the_first_data_is_rejected_for_faults_that_no_data_may_have(tmp_path: Path) -> None:
    changes = {3: ",red,yes", 5: "inf,red,yes", 9: "9.5,red,maybe", 11: "11.5,blue,"}
    validation = validate(DataSpec(uri=table(tmp_path / "bad.csv", changes)))
    assert not validation.success
    found = {
        key: (entry.unexpected_count, [row["index"] for row in entry.sample_rows])
        for key, entry in failed(validation).items()
        if entry.unexpected_count
    }
    assert found == {
        ("expect_column_values_to_not_be_null", "a"): (1, [3]),
        ("expect_column_values_to_be_between", "a"): (1, [5]),
        ("expect_column_values_to_be_between", "rows with this label"): (1, [9]),
        ("expect_column_values_to_not_be_null", "label"): (1, [11]),
    }
    said = "data.target 'label': 1 row is of a class with fewer than 2 rows, the first is row 9"
    assert said in failure_line(validation)


def test_data_without_rows_is_rejected_by_its_row_count(tmp_path: Path) -> None:
    validation = validate(DataSpec(uri=table(tmp_path / "empty.csv", rows=0)))
    assert (validation.success, validation.checked_rows, validation.data) == (False, 0, None)
    assert failed(validation)["expect_table_row_count_to_be_between", None].observed == 0


GIVEN: list[dict[str, Any]] = [
    {"type": "expect_column_values_to_be_between", "kwargs": {"column": "a", "max_value": 30}},
    {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "weight"}},
    {
        "type": "expect_column_quantile_values_to_be_between",
        "kwargs": {
            "column": "a",
            "quantile_ranges": {"quantiles": [0.5], "value_ranges": [[0, 100]]},
        },
    },
    {
        "type": "expect_column_values_to_be_in_set",
        "kwargs": {"column": "label", "value_set": ["no", "yes"]},
    },
]


def test_a_given_suite_replaces_the_inferred_one_and_names_rows_and_missing_columns(
    tmp_path: Path,
) -> None:
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps({"name": "mine", "expectations": GIVEN, "meta": {}}))
    spec = DataSpec(uri=table(tmp_path / "data.csv"), expectations=str(suite))
    validation = validate(
        spec, kept_suite=[{"type": "expect_column_to_exist", "kwargs": {"column": "never"}}]
    )
    assert (validation.success, validation.suite_source, validation.suite) == (
        False,
        "given",
        GIVEN,
    )
    assert [entry.success for entry in validation.expectations] == [False, False, True, True]
    high, absent = validation.expectations[:2]
    assert (high.unexpected_count, high.sample_rows[0]) == (
        10,
        {"index": 30, "a": 30.5, "label": "no", "colour": "blue"},
    )
    assert len(high.sample_rows) == 5
    assert 'The column "weight" in BatchData does not exist' in str(absent.observed)
    assert "Traceback" not in json.dumps(validation.great_expectations)


def test_an_inferred_suite_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("a,label\n" + "".join(f"{n}.5,{'yes' if n % 3 else 'no'}\n" for n in range(30)))
    inferred = validate(DataSpec(uri=str(path)))
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps(inferred.suite))
    given = validate(DataSpec(uri=str(path), expectations=str(suite)))
    assert (given.success, given.suite_source) == (True, "given")
    assert [one.success for one in given.expectations] == [True] * len(inferred.suite)


def test_data_that_passes_a_given_suite_must_still_be_usable_for_training(tmp_path: Path) -> None:
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps(GIVEN[3:]))
    validation = validate(
        DataSpec(uri=table(tmp_path / "hole.csv", {4: ",red,no"}), expectations=str(suite))
    )
    assert (validation.success, validation.data) == (False, None)
    line = failure_line(validation)
    assert line.startswith("the data fails 1 of 2 expectations: data.uri: ")
    assert "column 'a': 1 of 40 values are missing" in line


def test_the_screen_has_the_bounds_and_what_was_observed(home: Path, tmp_path: Path) -> None:
    bounds: list[dict[str, float]] = [
        {"min_value": 0, "max_value": 2000.5},
        {"min_value": 0.25},
        {"max_value": 20, "mostly": 0.5},
    ]
    suite = [
        {"type": "expect_column_values_to_be_between", "kwargs": {"column": "a"} | one}
        for one in bounds
    ]
    suite.append(
        {"type": "expect_column_mean_to_be_between", "kwargs": {"column": "a", "max_value": 1e16}}
    )
    (tmp_path / "suite.json").write_text(json.dumps([*suite, GIVEN[3]]))
    table(tmp_path / "data.csv")
    job = tmp_path / "job.yaml"
    job.write_text("{name: x, data: {uri: data.csv, expectations: suite.json}}")
    done = run("validate", str(job), TRAINWRIGHT_STORE=(tmp_path / "store").as_uri())
    assert done.returncode == 0, done.stderr
    assert [" ".join(line.split()) for line in done.stdout.splitlines()[2:7]] == [
        "met a values to be between 0 and 2,000.5 all values",
        "met a values to be at least 0.25 all values",
        "met a values to be at most 20: mostly 0.5 [20.5, 21.5, 22.5, 23...",
        "met a mean to be at most 1e+16 20",
        "met label values to be in set: ['no', 'yes'] all values",
    ]


def test_the_screen_has_what_fails_first_and_the_rows_without_figures_of_labels(
    home: Path, tmp_path: Path
) -> None:
    table(tmp_path / "data.csv", {2: ",red,yes"})
    (tmp_path / "net.py").write_text("def build_model(): ...")
    job = tmp_path / "job.yaml"
    job.write_text("{name: x, data: {uri: data.csv}, model: {source: net.py}}")
    done = run("validate", str(job), TRAINWRIGHT_STORE=(tmp_path / "store").as_uri())
    assert done.returncode == 1
    shown = [" ".join(line.split()) for line in done.stdout.splitlines()]
    states = [line.split()[0] for line in shown if line.startswith(("FAILED", "met"))]
    assert states == sorted(states)  # what fails comes first
    assert "FAILED a values to not be null 1 missing" in shown
    place = shown.index("a, values to not be null: the row that fails")
    head, row = shown[place + 1 : place + 3]
    assert set(head.split()) == {"row", "a", "colour", "label"}
    assert row.startswith("2 missing ")


def test_numbers_expected_of_texts_are_said_in_words(home: Path, tmp_path: Path) -> None:
    table(tmp_path / "data.csv", {2: "old,red,yes"})
    suite = [
        {"type": f"expect_column_{name}_to_be_between", "kwargs": {"column": "a", "max_value": 9}}
        for name in ("values", "mean")
    ]
    (tmp_path / "suite.json").write_text(json.dumps(suite))
    job = tmp_path / "job.yaml"
    job.write_text("{name: x, data: {uri: data.csv, expectations: suite.json}}")
    done = run("validate", str(job), TRAINWRIGHT_STORE=(tmp_path / "store").as_uri())
    assert done.returncode == 1
    said = "texts, which this expectation can't compare"
    for text in (done.stdout, done.stderr):  # a narrow screen folds it
        assert "".join(text.split()).count("".join(said.split())) == 2


def test_a_large_table_is_checked_exactly(tmp_path: Path) -> None:
    rows = 1_300_000
    array = np.zeros(rows, dtype=[("a", "f4"), ("label", "i4")])
    array["a"] = np.arange(rows) % 1000
    array["label"] = np.arange(rows) % 3
    array["label"][1_200_003] = 7
    array["a"][734_567] = np.nan
    array["a"][1_000_001] = np.inf
    np.save(tmp_path / "large.npy", array)
    validation = validate(DataSpec(uri=str(tmp_path / "large.npy")))
    assert validation.checked_rows == rows
    assert validation.expectations[0].observed == rows
    odd = {
        (entry.column, row["index"])
        for entry in failed(validation).values()
        for row in entry.sample_rows
    }
    shares = {"rows with this label", "share of this label"}
    assert {row for column, row in odd if column in shares} == {1_200_003}
    assert {row for column, row in odd if column == "a"} == {734_567, 1_000_001}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"data\.expectations: .*suite\.json: no such file"),
        ("{", r"data\.expectations: got .*suite\.json; it is not JSON"),
        ("{}", "holds no expectations; allowed: a list of expectations, or a suite with them"),
        ('[{"kwargs": {}}]', r"entry 0 is no expectation; allowed: \{\"type\""),
    ],
)
def test_an_invalid_suite_file_is_refused_at_once(
    tmp_path: Path, content: str | None, said: str
) -> None:
    suite = tmp_path / "suite.json"
    if content is not None:
        suite.write_text(content)
    with pytest.raises(BadInput, match=said):
        validate(DataSpec(uri="builtin:digits", expectations=str(suite)))


def test_an_unknown_expectation_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "suite.json").write_text('[{"type": "expect_bananas"}]')
    with pytest.raises(BadInput, match="expect_bananas not found"):
        validate(DataSpec(uri="builtin:digits", expectations=str(tmp_path / "suite.json")))


def test_a_target_without_a_column_is_an_error_of_the_job(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"data\.target: got 'lable'; allowed: .*: a, colour, label"):
        validate(DataSpec(uri=table(tmp_path / "data.csv"), target="lable"))


def test_a_missing_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no such file"):
        validate_data({"uri": str(tmp_path / "none.csv")}, doors.settings())


def test_a_check_that_takes_too_long_is_stopped() -> None:
    before = set(psutil.Process().children(recursive=True))
    settings = doors.settings().replaced({"TRAINWRIGHT_VALIDATE_TIMEOUT_S": "0.05"})
    with pytest.raises(TrainwrightError, match=r"within 0\.05 s; TRAINWRIGHT_VALIDATE_TIMEOUT_S"):
        validate_data({"uri": "builtin:digits"}, settings)
    assert set(psutil.Process().children(recursive=True)) <= before


def start_validation() -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """A validating process, and its child process with Great Expectations."""
    code = """if True:
        from trainwright.tasks.spec.data_spec import DataSpec
        from trainwright.tasks.spec.job import Job
        from trainwright.tasks.validate import validate
        validate(DataSpec(uri="builtin:digits"))"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    while parent.poll() is None:
        for child in psutil.Process(parent.pid).children():
            if "trainwright.tasks.validate.expectations" in child.cmdline():
                return parent, child
        time.sleep(0.01)
    raise AssertionError("it ended without a process for Great Expectations")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_parent_leaves_no_process(how: signal.Signals) -> None:
    parent, child = start_validation()
    parent.send_signal(how)
    assert parent.wait(30) != 0
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_process_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_S3_SECRET_KEY", "not-for-it")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-for-it")
    parent, child = start_validation()
    environment = child.environ()
    parent.kill()
    parent.wait()
    assert environment
    assert "not-for-it" not in environment.values()
