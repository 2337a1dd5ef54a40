"""Commands that make and show runs: run, search-lr, train, replan, analyze, show."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.estimator.errors import BadInput, TrainwrightError
from trainwright.estimator.named_file import read_named
from trainwright.tasks.cli.options import (
    Debug,
    JobFile,
    Json,
    New,
    PoolFile,
    Set,
    Store,
    print_json,
    print_model,
)

if TYPE_CHECKING:
    from trainwright.tasks.runs.artefacts.plan import Plan
    from trainwright.tasks.runs.run import Run
    from trainwright.tasks.settings import Settings


def run(
    job: JobFile,
    pool: PoolFile = None,
    changes: Set = None,
    new: New = False,
    replay: Annotated[
        str | None,
        typer.Option(
            "--replay", metavar="RUN", help="use this run's plan, learning rate and split events"
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the whole chain for a job, through Airflow, from validation to the report.

    Continues the job's newest unfinished run, if there is one.
    """
    from trainwright.tasks import progress
    from trainwright.tasks.cli.airflow_run import ensure_store, run_job
    from trainwright.tasks.cli.screens.runs.run_view import Watch
    from trainwright.tasks.runs.run import resolve
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.spec.job import load_job
    from trainwright.tasks.summary import summary

    for number in (signal.SIGINT, signal.SIGTERM):  # a shell ignores SIGINT in background jobs
        signal.signal(number, signal.default_int_handler)
    settings = Settings.from_environment()
    chosen = load_job(job, pool, changes or ())
    if replay is not None:
        ensure_store(settings.store, settings)
        replay = resolve(replay, settings).uri
    with Watch() as watch, progress.listening(watch):
        done = run_job(chosen, settings, new=new, replay=replay, watch=watch)
    _show(summary(done), settings, as_json=as_json)


def _show(
    document: dict[str, Any], settings: Settings, *, as_json: bool, everything: bool = False
) -> None:
    """A run's summary, as a document or for a person."""
    from trainwright.tasks.cli.screens.runs.run_screen import show_run

    if as_json:
        print_json(document)
        return
    program = "trainwright" if shutil.which("trainwright") else sys.argv[0]
    uri = str(document["run"])
    known = uri.startswith(f"{settings.store.rstrip('/')}/")
    show_run(
        document,
        f"{program} show {uri.rsplit('/', 1)[-1] if known else uri}",
        everything=everything,
    )


def _in_process(
    job: Path,
    pool: Path | None,
    changes: list[str] | None,
    store: str | None,
    name: str,
    *,
    plan_file: Path | None = None,
    new: bool = False,
) -> Run:
    """Do a step of a job's run, and missing earlier steps, in this process; release the devices."""
    from trainwright.tasks import chain, progress
    from trainwright.tasks.allocate.layouts.permitted import overrides
    from trainwright.tasks.cli.airflow_run import supervised_store
    from trainwright.tasks.cli.screens.runs.run_view import Watch
    from trainwright.tasks.context import RunContext
    from trainwright.tasks.errors import Interrupted
    from trainwright.tasks.leases.ledger import Holder
    from trainwright.tasks.runs.artefacts.plan import Plan
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.spec.documents import parsed
    from trainwright.tasks.spec.job import load_job

    settings = Settings.from_environment()
    chosen = load_job(job, pool, changes or ())
    given = None
    if plan_file is not None:
        given = parsed(Plan, read_named(plan_file, "--plan"), f"--plan: {plan_file}")
    holder = Holder(f"{getpass.getuser()}@{socket.gethostname()} pid {os.getpid()}", os.getpid())
    with (
        Watch() as watch,
        progress.listening(watch),
        supervised_store(store or settings.store, settings),
    ):
        context = RunContext.open(chosen, settings, holder, store=store, new=new)
        run = context.run
        watch({"event": "run", "run": run.uri})
        try:
            with chain.signals_stop(context):
                if given is not None:
                    _take_plan(run, given)
                    if overrides(given.layout, run.job().train):
                        layout = given.layout.name if given.layout else "data-parallel"
                        message = f"--plan: train.layout asks for another layout than {layout}"
                        progress.emit("notice", message=f"{message}; the plan's is used")
                chain.do(context, name)
        except TrainwrightError as error:
            error.run = run.uri
            raise
        except KeyboardInterrupt:
            ended = Interrupted(f"interrupted; the same command continues {run.uri}")
            ended.run = run.uri
            raise ended from None
        finally:
            context.ledger.release(run.uri, holder=holder.name)
    return run


def _take_plan(run: Run, given: Plan) -> None:
    """Make a plan the run's. Raises BadInput, and keeps the run's own, if it can't be trained."""
    from trainwright.tasks.allocate.layouts.permitted import require_trained
    from trainwright.tasks.runs.artefacts.plan import Plan
    from trainwright.tasks.runs.artefacts.training_result import Result

    if run.has(Result):
        if given != run.find(Plan):
            run.note(state="success", step=None)
            raise BadInput(
                f"--plan: {run.uri} is trained already, by another plan; allowed: its plan.json, "
                "or --new for another run"
            )
        return
    try:
        require_trained(given)
    except BadInput as error:
        run.note(state="failed", step=None, error=error.document())
        raise
    run.write(given)


def search_lr(
    job: JobFile,
    pool: PoolFile = None,
    changes: Set = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the learning rate on leased devices, with the job's model and data."""
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch

    run = _in_process(job, pool, changes, store, "search_lr")
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
    changes: Set = None,
    new: New = False,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="a plan.json to train with")
    ] = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a job without Airflow; missing earlier steps are done first."""
    from trainwright.tasks.summary import summary

    run = _in_process(job, pool, changes, store, "train", plan_file=plan_file, new=new)
    run.note(state="success", step=None)
    _show(summary(run), run.settings, as_json=as_json)


def replan(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="a run that is training")],
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Replan a running training with the pool file's current devices.

    The training writes a checkpoint, and continues with the devices of the new plan.
    """
    from trainwright.tasks.allocate.acquire import devices_of
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.context import RunContext
    from trainwright.tasks.leases.ledger import Holder
    from trainwright.tasks.runs.run import resolve
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.spec.pool import load_pool

    chosen = resolve(run_id, Settings.from_environment(), store)
    load_pool(chosen.job().pool)  # a pool that cannot be read would end the training
    context = RunContext(chosen, Holder("replan"))
    devices = context.ledger.ask_to_replan(chosen.uri, devices_of(context))
    if not devices:
        raise BadInput(f"replan: {chosen.uri} holds no devices; allowed: a run that is training")
    if as_json:
        print_json({"run": chosen.uri, "devices": devices})
        return
    console.facts(
        "replan",
        [("run", chosen.uri), ("trains on", f"{devices} device(s)"), ("new plan", "within 15 s")],
    )


def analyze(
    run_id: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="a run; default: the newest finished one")
    ] = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare a finished run with all earlier ones, and write its report again."""
    from trainwright.tasks.analyze.history import analyze as report_on
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.runs.artefacts.training_result import Result
    from trainwright.tasks.runs.run import list_runs, resolve
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.units import counted

    settings = Settings.from_environment()
    if run_id is not None:
        chosen = resolve(run_id, settings, store)
        if not chosen.has(Result):
            raise BadInput(f"analyze: {chosen.uri} has not finished training")
    else:
        finished = (one for one in list_runs(store or settings.store, settings) if one.finished())
        found = next(finished, None)
        if found is None:
            raise BadInput(
                "analyze: the store has no finished run; start one with `trainwright run JOB`"
            )
        chosen = found
    report = report_on(chosen)
    if as_json:
        print_model(report)
        return
    lines = [
        ("run", report.run),
        ("report", f"{chosen.uri}/{report.html}"),
        ("compared with", counted(report.runs_compared, "run")),
    ]
    console.facts("report", lines)


def show(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="a run's id or URI")],
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="save the run's report to a file"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="draw the run's plan: time against energy and cost, and the timeline of a step: "
            ".svg or .html",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="also why each choice was made, and the time of each step"),
    ] = False,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a run: predicted and measured values, devices, and where its files are."""
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.runs.run import resolve
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.summary import summary

    settings = Settings.from_environment()
    chosen = resolve(run_id, settings, store)
    if report is not None:
        from trainwright.estimator.named_file import write_named
        from trainwright.tasks.analyze.exports_section import with_exports
        from trainwright.tasks.analyze.report import is_report
        from trainwright.tasks.cli.output import check_output

        check_output(report, "--report", "run's report", is_report)
        try:
            content = chosen.objects.get("report/report.html")
        except FileNotFoundError:
            raise BadInput(
                f"{chosen.uri}: has no report yet; `trainwright analyze RUN` writes one"
            ) from None
        write_named(report, with_exports(content, chosen), "--report")
        console.err.print(f"saved to {report}")
    if plot is not None:
        _draw_plan(chosen, plot)
    _show(summary(chosen), settings, as_json=as_json, everything=everything)


def _draw_plan(chosen: Run, plot: Path) -> None:
    """Draw a run's plan into a file. Raises BadInput without a plan."""
    from trainwright.tasks.cli.screens.plans.plan_plot import check_plot, draw_plan
    from trainwright.tasks.runs.artefacts.estimate import Estimate
    from trainwright.tasks.runs.artefacts.plan import Plan
    from trainwright.tasks.runs.artefacts.training_result import Result

    check_plot(plot)
    plan, estimate = chosen.find(Plan), chosen.find(Estimate)
    if plan is None or estimate is None:
        raise BadInput(f"--plot: {chosen.uri} has no plan yet; its step allocate makes one")
    draw_plan(plan, estimate, plot, chosen.find(Result))
