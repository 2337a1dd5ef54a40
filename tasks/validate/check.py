"""Checks data with Great Expectations.

The suite is the job's own, or the one kept from the job's first data, or inferred
(`tasks.validate.suite`). Great Expectations runs in a separate process
(`tasks.validate.expectations`), which does not get this process's secrets and ends with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from trainwright.estimator.named_file import read_named
from trainwright.infra.process import dying_with_parent
from trainwright.infra.temporary_folder import temporary_folder
from trainwright.tasks.data.job_fields import require_job_fields
from trainwright.tasks.errors import BadInput, TrainwrightError, from_document
from trainwright.tasks.runs.artefacts.validation import Expectation, Validation
from trainwright.tasks.settings import VALIDATE_TIMEOUT_S
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.validate.drift.compare_profiles import drift_line
from trainwright.tasks.validate.label_columns import target_of
from trainwright.tasks.validate.row_condition import is_plain_condition

_PASSED_ON = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
)
_KEYS = ("type", "kwargs", "meta", "severity")
_NAMED = 5
_COLUMNS = "expect_table_columns_to_match_set"
_FORGET = (
    "the suite is kept from the job's earlier data: if the data was meant to change, "
    "`trainwright validate JOB --forget-suite`"
)


def validate(
    data: DataSpec,
    *,
    seed: int = 0,
    kept_suite: list[dict[str, Any]] | None = None,
    timeout_s: float = VALIDATE_TIMEOUT_S,
) -> Validation:
    """Check the data. `success` is False if it fails an expectation or can't be used for training.

    All rows are checked. `checked_rows` is their number.

    Raises BadInput if there is nothing to check (no such file, an invalid file, a missing target)
    or the job's fields or suite do not fit, TrainwrightError if it takes longer than `timeout_s`.
    """
    require_job_fields(data)
    suite, source = (kept_suite, "kept") if kept_suite is not None else ([], "inferred")
    if data.expectations is not None:
        suite, source = read_suite(data.expectations), "given"
    request = {
        "data": data.model_dump(mode="json", exclude={"expectations", "drift", "reference"}),
        "seed": seed,
        "suite_source": source,
        "suite": suite,
    }
    answer = _ask(request, timeout_s)
    if "error" in answer:
        raise from_document(answer["error"])
    return Validation.model_validate(answer)


def read_suite(file: str) -> list[dict[str, Any]]:
    """The expectations in a JSON file: a list of `{"type", "kwargs"}`, or a saved suite."""
    content = read_named(unquote(file.removeprefix("file://")), "data.expectations")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"data.expectations: got {file}; it is not JSON: {error}") from error
    return expectations_in(document, f"data.expectations: {file}")


def expectations_in(document: Any, name: str) -> list[dict[str, Any]]:
    """The expectations of a list or of a saved suite. `name`: for errors. Raises BadInput."""
    entries = document.get("expectations") if isinstance(document, dict) else document
    if not isinstance(entries, list) or not entries:
        raise BadInput(
            f"{name} holds no expectations; allowed: a list of expectations, or a suite with them"
        )
    for number, entry in enumerate(entries):
        named = isinstance(entry, dict) and isinstance(entry.get("type"), str)
        if not named or not isinstance(entry.get("kwargs", {}), dict):
            raise BadInput(
                f"{name}, entry {number} is no expectation; "
                'allowed: {"type": "expect_…", "kwargs": {…}}'
            )
        condition = entry.get("kwargs", {}).get("row_condition")
        if condition is not None and not is_plain_condition(condition):
            raise BadInput(
                f"{name}, entry {number}: row_condition: got {str(condition)[:80]!r}; allowed: "
                'comparisons of columns with values, such as age > 3 and town == "Rome"'
            )
    return [
        {"kwargs": {}} | {key: entry[key] for key in _KEYS if entry.get(key) is not None}
        for entry in entries
    ]


def _ask(request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The answer of the process with Great Expectations, which has ended when this returns."""
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment |= {"GX_ANALYTICS_ENABLED": "false", "PYTHONWARNINGS": "ignore"}
    with temporary_folder("trainwright-validate-") as folder:
        question, answer, log = (
            folder / file for file in ("request.json", "response.json", "log.txt")
        )
        question.write_text(json.dumps(request))
        environment["TMPDIR"] = str(folder)  # if it is killed, this process removes its files
        command = [
            sys.executable,
            "-P",
            "-m",
            "trainwright.tasks.validate.expectations",
            str(question),
            str(answer),
        ]
        code = exit_code(command, environment, log, timeout_s)
        if code != 0:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise TrainwrightError(
                f"validate: the process with Great Expectations exited with {code}: {lines[-1]}"
            )
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def exit_code(
    command: list[str], environment: Mapping[str, str], log: Path, timeout_s: float
) -> int:
    """Run a command in the log's folder, and wait. Raises TrainwrightError if it is too slow."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            dying_with_parent(command),
            env=environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise TrainwrightError(
            f"validate: Great Expectations did not finish within {timeout_s:g} s; "
            "TRAINWRIGHT_VALIDATE_TIMEOUT_S raises the limit"
        ) from None
    finally:
        process.kill()
        process.wait()


def failure_line(validation: Validation) -> str:
    """One line with the failing expectations and counts, and the columns that drifted."""
    failed = [expectation for expectation in validation.expectations if not expectation.success]
    failed.sort(key=lambda one: one.expectation.startswith("expect_"))  # why it can't be used first
    total = len(validation.expectations)
    intro = f"the data fails {len(failed)} of {total} expectations"
    columns = next((one for one in failed if one.expectation == _COLUMNS), None)
    # What other expectations say of columns that are not there adds nothing.
    if columns is not None:
        lacking = set(columns.expected.get("column_set", ())) - set(columns.observed or ())
        failed = [columns, *(one for one in failed if one.column not in lacking and one != columns)]
    listed = "; ".join(_line(expectation) for expectation in failed[:_NAMED])
    more = f"; and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    mend = f"; {_FORGET}" if failed and validation.suite_source == "kept" else ""
    parts = [f"{intro}: {listed}{more}{mend}"]
    drift = validation.drift
    if drift is None or not drift.rejected:
        return parts[0]
    lines = [drift_line(column) for column in drift.drifted]
    more = f"; and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    count = f"{len(lines)} column{'s' if len(lines) > 1 else ''}"
    drifted = f"{count} drifted from {drift.reference}: {'; '.join(lines[:_NAMED])}{more}"
    return "; ".join([*parts, drifted]) if failed else f"the data has drifted: {drifted}"


def _columns_line(failed: Expectation) -> str:
    """How a table's columns, or its target, differ from those of the data that the suite is of."""
    had, has = failed.expected.get("column_set", ()), failed.observed or ()
    was, now = (
        min((target for name in names if (target := target_of(name)) is not None), default=None)
        for names in (had, has)
    )
    lost, new = (
        [repr(name) for name in names if name not in others and target_of(name) is None]
        for names, others in ((had, has), (has, had))
    )
    parts = [
        f"the target was {was!r} and is {now!r}" if None not in (was, now) and was != now else "",
        f"no column {', '.join(lost[:_NAMED])}{' …' * (len(lost) > _NAMED)}" if lost else "",
        f"unknown column {', '.join(new[:_NAMED])}{' …' * (len(new) > _NAMED)}" if new else "",
    ]
    return ", ".join(part for part in parts if part) or "other columns"


def _line(failed: Expectation) -> str:
    if failed.expectation == _COLUMNS and isinstance(failed.observed, list):
        return _columns_line(failed)
    least = failed.expected.get("min_value")
    target = target_of(failed.column or "")
    if target is not None and failed.unexpected_count and least is not None:
        count = failed.unexpected_count
        rows = "1 row is" if count == 1 else f"{count} rows are"
        few = f"fewer than {least:g}" if least >= 1 else f"less than {100 * least:.3g} % of all"
        return f"data.target {target!r}: {rows} of a class with {few} rows{_first_row(failed)}"
    name = failed.expectation + (f"({failed.column})" if failed.column is not None else "")
    if failed.unexpected_count:
        rows = "row" if failed.unexpected_count == 1 else "rows"
        return f"{name}: {failed.unexpected_count} {rows}{_first_row(failed)}{_allowed(failed)}"
    if not failed.expectation.startswith("expect_"):  # our own: why no arrays can be made
        return str(failed.observed)
    if isinstance(failed.observed, str):  # the error that evaluating it raised
        return f"{name}: {_short(failed.observed)}"
    return f"{name}: got {_short(str(failed.observed))}{_allowed(failed)}"


def _first_row(failed: Expectation) -> str:
    """The first failing row: its number, its value, and the target's beside it."""
    if not failed.sample_rows:
        return ""
    row = dict(failed.sample_rows[0])
    index = row.pop("index")
    values = [f"{name} = {_short(repr(value), 40)}" for name, value in list(row.items())[:2]]
    return f", the first is row {index}" + (f" ({', '.join(values)})" if values else "")


def _allowed(failed: Expectation) -> str:
    allowed = ", ".join(f"{key}={_short(str(value))}" for key, value in failed.expected.items())
    return f", expected {allowed}" if allowed else ""


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
