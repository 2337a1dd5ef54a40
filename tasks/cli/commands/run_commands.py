"""Commands that make runs: run, search-lr, train."""

from __future__ import annotations

import getpass
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    print_model,
)

if TYPE_CHECKING:
    from trainwright.tasks.runs.artefacts.plan import Plan
    from trainwright.tasks.runs.run import Run


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
    from trainwright.tasks.cli.commands.show_commands import print_run
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
    print_run(summary(done), settings, as_json=as_json)


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
        except (Interrupted, KeyboardInterrupt) as error:
            how = str(error) or "interrupted"
            ended = Interrupted(f"{how}; the same command continues {run.uri}")
            ended.run = run.uri
            raise ended from None
        except TrainwrightError as error:
            error.run = run.uri
            raise
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
    from trainwright.tasks.cli.commands.show_commands import print_run
    from trainwright.tasks.summary import summary

    run = _in_process(job, pool, changes, store, "train", plan_file=plan_file, new=new)
    run.note(state="success", step=None)
    print_run(summary(run), run.settings, as_json=as_json)
