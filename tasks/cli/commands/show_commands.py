"""Commands about a run that exists: replan, analyze, show."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.estimator.errors import BadInput
from trainwright.tasks.cli.options import Debug, Json, Store, print_json, print_model

if TYPE_CHECKING:
    from trainwright.tasks.runs.run import Run
    from trainwright.tasks.settings import Settings


def print_run(
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
    from trainwright.tasks.units import counted

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
        [
            ("run", chosen.uri),
            ("trains on", counted(devices, "device")),
            ("new plan", "within 15 s"),
        ],
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
    from trainwright.tasks.analyze.step import compared
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.runs.artefacts.training_result import Result
    from trainwright.tasks.runs.run import list_runs, resolve
    from trainwright.tasks.settings import Settings

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
        ("history", compared(report.runs_compared)),
    ]
    console.facts("report", lines)


def show(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="a run's id or URI")],
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="save the run's report to a file; of rejected data, its page",
        ),
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
        write_named(report, with_exports(_report(chosen), chosen), "--report")
        console.err.print(f"saved to {report}")
    if plot is not None:
        _draw_plan(chosen, plot)
    print_run(summary(chosen), settings, as_json=as_json, everything=everything)


def _report(chosen: Run) -> bytes:
    """A run's report, or the page of its rejected data. Raises BadInput if it has neither."""
    from trainwright.tasks.runs.artefacts.validation import REJECTION

    for key in ("report/report.html", REJECTION):
        with contextlib.suppress(FileNotFoundError):
            return chosen.objects.get(key)
    raise BadInput(f"{chosen.uri}: has no report yet; `trainwright analyze RUN` writes one")


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
