"""Turns errors of tasks into Airflow's, and keeps their tracebacks out of a task's log.

An expected failure is one line of the log: the field, what was given, and what is allowed or how to
go on. Airflow logs the traceback of every exception that ends a task; `one_line` takes it out of
that record. Other exceptions keep theirs.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from trainwright.tasks import progress
from trainwright.tasks.errors import (
    BusyMachine,
    Interrupted,
    NotInstalled,
    RunHeld,
    ServiceUnreachable,
    TrainwrightError,
)
from trainwright.tasks.event_lines import MovingLines

_CLEAR = "; it continues when Airflow retries this task or somebody clears it"
_AFRESH = "a trigger with `new` (Start afresh)"
_WORDS = (
    (r"start a new run with --new|`trainwright run JOB --new`", _AFRESH),
    (r"--new (starts|for)", rf"{_AFRESH} \1"),
    (r"the same command|`trainwright run( JOB)?`", "clearing this task, or a new trigger,"),
    (r"start again", "clear this task"),
    (r"--set ([\w.]+)", r"\1 in the job"),
    (r"--to\b", "export.to"),
    (r"--budget\b", "budget_s"),
    (r"--most-drift\b", "most_drift"),
    (r"--(\w[\w-]*)", r"\1"),
)
"""What messages say to somebody at a terminal, and what that is in Airflow."""
_RETRIED = (ServiceUnreachable, RunHeld, BusyMachine, Interrupted)


class ExpectedFailure(AirflowFailException):
    """An error that a retry cannot fix, in one line: `kind: what is wrong; what is allowed`."""


@contextlib.contextmanager
def airflow_errors() -> Iterator[None]:
    """Turns errors that a retry cannot fix into ExpectedFailure; raises others unchanged."""
    try:
        yield
    except TrainwrightError as error:
        _log_in_one_line()
        if isinstance(error, _RETRIED) and not isinstance(error, NotInstalled):
            raise
        raise ExpectedFailure(f"{error.kind}: {airflows_words(str(error))}") from None


def lines_in_log() -> contextlib.AbstractContextManager[None]:
    """Inside the block, the task's log has a line about long work at intervals."""
    return progress.listening(MovingLines(progress.log_line))


def one_line(_logger: Any, _level: str, record: MutableMapping[str, Any]) -> Any:
    """A structlog processor: the record of an expected failure has its line, and no traceback."""
    error = sys.exc_info()[1]
    if record.get("exc_info") and isinstance(error, ExpectedFailure | TrainwrightError):
        del record["exc_info"]
        record["event"] = str(error)
        if isinstance(error, TrainwrightError):
            way_out = _CLEAR if isinstance(error, Interrupted) else ""
            record["event"] = f"{error.kind}: {airflows_words(str(error))}{way_out}"
    return record


def airflows_words(text: str) -> str:
    """A message with what to do in Airflow instead of a command of the terminal or its options."""
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text


def _log_in_one_line() -> None:
    """Let the loggers of this process, that of the task, apply `one_line` first.

    Airflow's loggers keep the list of processors that they were made with, so it is changed in
    place. A list that isn't one, in a configuration of the user's, is left alone.
    """
    import structlog

    processors = structlog.get_config()["processors"]
    if isinstance(processors, list) and one_line not in processors:
        processors.insert(0, one_line)
