"""`runs`: lists the runs of a store, all or by state, job and age; once, or until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.estimator.errors import BadInput
from trainwright.estimator.near_names import meant
from trainwright.tasks.cli.options import Debug, Json, Store, print_json, require_there

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainwright.tasks.settings import Settings

STATES = ("running", "success", "failed", "infeasible", "interrupted", "left", "damaged")
WATCH_EVERY_S = 2.0


def runs(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB NAME]", help="only this job's runs")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help=f"only runs in this state; repeatable: {', '.join(STATES)}",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="only runs begun in this time, such as 8h"),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="list them again every 2 s, until Ctrl-C")
    ] = False,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the runs, newest first."""
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.spec.documents import validated
    from trainwright.tasks.spec.job import JobName

    if job is not None:
        validated(JobName, {"name": job}, "runs")
    for one in state or ():
        if one not in STATES:
            raise BadInput(
                f"--state: got {one!r}; allowed: {', '.join(STATES)}{meant(one, STATES)}"
            )
    if watch and as_json:
        raise BadInput("--watch: got --json too; allowed: one of them")
    age_s = None if since is None else _age_s(since)
    settings = Settings.from_environment()
    require_there(store, settings)

    def found() -> list[dict[str, Any]]:
        return _found(store or settings.store, settings, job, state, age_s)

    if as_json:
        print_json({"runs": found()})
    elif watch:
        _watch(found)
    else:
        console.out.print(_table(found()))
        console.out.print()


def _age_s(since: str) -> float:
    from pydantic import TypeAdapter, ValidationError

    from trainwright.tasks.spec.documents import Duration, one_line

    try:
        return TypeAdapter(Duration).validate_python(since)
    except ValidationError as error:
        raise BadInput(f"--since: {one_line(error)}") from None


def _found(
    store: str, settings: Settings, job: str | None, states: list[str] | None, age_s: float | None
) -> list[dict[str, Any]]:
    """The rows, newest first. A run's id begins with the time of its begin, in UTC."""
    from trainwright.tasks.runs.listing import row_of
    from trainwright.tasks.runs.run import list_runs

    first = ""
    if age_s is not None:
        first = f"{datetime.now(UTC) - timedelta(seconds=age_s):%Y%m%dT%H%M%SZ}"
    chosen = (row_of(one) for one in list_runs(store, settings, job) if one.id >= first)
    return [
        row.model_dump()
        for row in chosen
        if row is not None and (not states or row.state in states)
    ]


def _table(documents: list[dict[str, Any]]) -> RenderableType:
    from trainwright.tasks import units
    from trainwright.tasks.cli.screens import console

    rows = [
        (
            str(one["job"]),
            _state(one),
            _result(one),
            _age(str(one["id"])),
            units.coarse(one["seconds"]),
            str(one["id"]),
        )
        for one in documents
    ]
    return console.grid(
        units.counted(len(rows), "run"),
        ("job", "state", "result", "age", "took", "run"),
        rows,
        right=(3, 4),
        whole=(0, 3, 4, 5),
    )


def _state(one: dict[str, Any]) -> str:
    """Short, so that a row fits 80 columns; the step of a run that goes on."""
    from trainwright.tasks.cli.screens import console

    words = console.state(str(one["state"]), one["stored"]).removeprefix("trained, ")
    return f"{words} ({one['step']})" if one["step"] else words


def _age(identifier: str) -> str:
    """The time since a run began, which its id begins with."""
    from trainwright.tasks import units

    begun = datetime.strptime(identifier[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    age_s = max(0.0, (datetime.now(UTC) - begun).total_seconds())
    return units.coarse(age_s)


def _result(one: dict[str, Any]) -> str:
    """The metric that stands for the model, by its name."""
    from trainwright.tasks.units import metric

    name = one["leading_metric"]
    return f"{name.replace('_', ' ')} {metric(one['metrics'][name])}" if name else ""


def _watch(found: Callable[[], list[dict[str, Any]]]) -> None:
    """Show the newest rows that fit the screen, again and again; Ctrl-C ends it."""
    from rich.live import Live

    from trainwright.tasks.cli.screens import console

    def now() -> RenderableType:
        rows = found()
        return _table(
            rows[: max(1, console.out.size.height - 4)] if console.out.is_terminal else rows
        )

    try:
        with Live(now(), console=console.out, auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_EVERY_S)
                live.update(now(), refresh=True)
    except KeyboardInterrupt:
        return
