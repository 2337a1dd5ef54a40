"""Commands that make runs and show them. Each reads arguments, calls a step, prints."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.estimator.errors import BadInput, TrainwrightError
from trainwright.estimator.named_file import read_named
from trainwright.tasks.cli.options import (
    Debug,
    JobFile,
    Json,
    New,
    PoolFile,
    Store,
    print_json,
    print_model,
    require_there,
)


def run(
    job: JobFile,
    pool: PoolFile = None,
    new: New = False,
    replay: Annotated[
        str | None,
        typer.Option("--replay", metavar="RUN", help="use a run's plan, learning rate, splits"),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Do the whole chain for a job, through Airflow: validate, size, train, store, analyse."""
    from trainwright.tasks import progress
    from trainwright.tasks.cli.airflow_run import ensure_store, run_job
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.cli.screens.run_view import Watch
    from trainwright.tasks.runs.run import resolve
    from trainwright.tasks.runs.summary import summary
    from trainwright.tasks.settings import settings
    from trainwright.tasks.spec.job import load_job

    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a shell's background jobs start with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    chosen = load_job(job, pool)
    if chosen.model is None:
        raise BadInput(f"{job}: model: missing, and needed by this step")
    if replay is not None:
        ensure_store(settings().store)
        replay = resolve(replay).uri
    with Watch() as watch:
        progress.listen(watch)
        done = run_job(chosen, new=new, replay=replay, watch=watch)
    document = summary(done)
    print_json(document) if as_json else console.show_run(document)


def _in_process(
    job: Path,
    pool: Path | None,
    store: str | None,
    name: str,
    *,
    plan_file: Path | None = None,
    new: bool = False,
) -> Any:
    """Do a step of a job's run in this process, and what is missing before it; give the devices back."""
    from trainwright.tasks import progress, step, steps
    from trainwright.tasks.cli.airflow_run import ensure_store, holder_name
    from trainwright.tasks.cli.screens.run_view import Watch
    from trainwright.tasks.errors import Interrupted
    from trainwright.tasks.leases.ledger import Holder
    from trainwright.tasks.runs.artefacts import Plan
    from trainwright.tasks.settings import settings
    from trainwright.tasks.spec.documents import parsed
    from trainwright.tasks.spec.job import load_job

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, step.ask_to_stop)
    chosen = load_job(job, pool)
    given = None
    if plan_file is not None:
        given = parsed(Plan, read_named(plan_file, "--plan"), f"--plan: {plan_file}")
    ensure_store(store or settings().store)
    with Watch() as watch:
        progress.listen(watch)
        run = steps.open_for(chosen, Holder(holder_name(), os.getpid()), store=store, new=new)
        watch({"event": "run", "run": run.uri})
        try:
            if given is not None:
                run.write(given)
            steps.do(run, name)
        except TrainwrightError as error:
            error.run = run.uri
            raise
        except KeyboardInterrupt:
            ended = Interrupted(f"interrupted; the same command goes on with {run.uri}")
            ended.run = run.uri
            raise ended from None
        finally:
            step.ledger().release(run.uri, holder=holder_name())
    return run


def search_lr(
    job: JobFile,
    pool: PoolFile = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the learning rate on the real model and data, on leased devices."""
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.runs.artefacts import LearningRateSearch

    run = _in_process(job, pool, store, "search_lr")
    result = run.read(LearningRateSearch)
    if as_json:
        print_model(result)
        return
    low, high = result.interval
    facts = [
        ("learning rate", f"{result.learning_rate:.3g}"),
        ("interval", f"{low:.2g} to {high:.2g}"),
        ("because", result.reason),
        ("run", run.uri),
    ]
    console.facts("learning rate", facts)


def train(
    job: JobFile,
    pool: PoolFile = None,
    new: New = False,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="a plan.json to train by")
    ] = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a job in this process's care, without Airflow; the steps before it are done where they are missing."""
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.runs.summary import summary

    run = _in_process(job, pool, store, "train", plan_file=plan_file, new=new)
    run.note(state="success", step=None)
    document = summary(run)
    print_json(document) if as_json else console.show_run(document)


def replan(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="a run that trains")],
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Have a run that trains plan anew with its pool as it is now: a checkpoint, then on with a new device."""
    from trainwright.tasks.allocate.acquire import devices_of
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.runs.run import resolve
    from trainwright.tasks.spec.pool import load_pool
    from trainwright.tasks.step import ledger

    chosen = resolve(run_id, store)
    load_pool(chosen.job().pool)  # one that can't be read would end the training
    devices = ledger().ask_to_plan_anew(chosen.uri, devices_of(chosen))
    if not devices:
        raise BadInput(f"replan: {chosen.uri} holds no devices; allowed: a run that trains")
    if as_json:
        print_json({"run": chosen.uri, "devices": devices})
        return
    console.facts(
        "replan",
        [("run", chosen.uri), ("trains on", f"{devices} device(s)"), ("plans anew", "within 15 s")],
    )


def analyze(
    run_id: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="a run; default: the newest finished one")
    ] = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Analyse a finished run beside all earlier ones; write its report anew."""
    from trainwright.tasks.analyze.history import analyze as report_on
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.runs.artefacts import Result
    from trainwright.tasks.runs.run import list_runs, resolve
    from trainwright.tasks.settings import settings

    if run_id is not None:
        chosen = resolve(run_id, store)
        if not chosen.has(Result):
            raise BadInput(f"analyze: {chosen.uri} has not finished training")
    else:
        finished = (one for one in list_runs(store or settings().store) if one.finished())
        found = next(finished, None)
        if found is None:
            raise BadInput(
                "analyze: the store holds no finished run; `trainwright run JOB` makes one"
            )
        chosen = found
    report = report_on(chosen, chosen.store_uri)
    if as_json:
        print_model(report)
        return
    lines = [
        ("run", report.run),
        ("report", f"{chosen.uri}/{report.html}"),
        ("compared with", f"{report.runs_compared} run(s)"),
    ]
    console.facts("report", lines)


def runs(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB NAME]", help="of this job only")
    ] = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the runs, newest first."""
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.runs.listing import row_of
    from trainwright.tasks.runs.run import list_runs
    from trainwright.tasks.settings import settings
    from trainwright.tasks.spec.documents import validated
    from trainwright.tasks.spec.job import JobName

    if job is not None:
        validated(JobName, {"name": job}, "runs")
    require_there(store)
    found = (row_of(one) for one in list_runs(store or settings().store, job))
    documents: list[dict[str, Any]] = [row.model_dump() for row in found if row is not None]
    if as_json:
        print_json({"runs": documents})
        return
    rows = [
        (
            str(one["id"]),
            str(one["job"]),
            str(one["state"]) + (f" ({one['step']})" if one["step"] else ""),
            console.seconds(one["seconds"]),
            _one_metric(one["metrics"]),
        )
        for one in documents
    ]
    console.table(
        f"{len(rows)} run(s)", ("run", "job", "state", "steps took", "result"), rows, right=(3,)
    )


def _one_metric(metrics: dict[str, float]) -> str:
    name = next((one for one in ("accuracy", "loss") if one in metrics), None)
    return f"{name} {metrics[name]:.4f}" if name else ""


def show(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="a run's id or URI")],
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="save the run's report to a file"),
    ] = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a run: what was predicted and measured, where things are."""
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.runs.run import resolve
    from trainwright.tasks.runs.summary import summary

    chosen = resolve(run_id, store)
    if report is not None:
        from trainwright.estimator.named_file import write_named
        from trainwright.tasks.analyze.report import is_report
        from trainwright.tasks.cli.output import check_output

        check_output(report, "--report", "run's report", is_report)
        try:
            write_named(report, chosen.objects.get("report/report.html"), "--report")
        except FileNotFoundError:
            raise BadInput(
                f"{chosen.uri}: has no report yet; `trainwright analyze RUN` writes one"
            ) from None
        console.err.print(f"saved to {report}")
    document = summary(chosen)
    print_json(document) if as_json else console.show_run(document)
