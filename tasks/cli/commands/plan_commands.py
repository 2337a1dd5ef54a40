"""Commands to use before a run: validate, plan."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.tasks.cli.options import (
    Debug,
    JobFile,
    Json,
    PoolFile,
    Set,
    print_model,
)

if TYPE_CHECKING:
    from trainwright.tasks.runs.artefacts.plan import JointPlan


def validate(
    job: JobFile,
    pool: PoolFile = None,
    changes: Set = None,
    forget_suite: Annotated[
        bool,
        typer.Option(
            "--forget-suite",
            help="remove the suite kept from earlier data: the next run infers it again",
        ),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a job's data against its expectations and an earlier run's data."""
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.cli.screens.validation_screen import show_validation
    from trainwright.tasks.errors import DataRejected
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.spec.job import load_job
    from trainwright.tasks.validate.check import failure_line
    from trainwright.tasks.validate.step import validate_job

    with console.working("checking the data with Great Expectations"):
        found = validate_job(
            load_job(job, pool, changes or ()),
            Settings.from_environment(),
            forget_kept_suite=forget_suite,
        )
    result = found.model_copy(update={"profile": None})  # large, and for later runs only
    if as_json and result.success:
        print_model(result)
    elif not as_json:
        show_validation(result)
    if not result.success:
        raise DataRejected(failure_line(result), validation=result.model_dump(mode="json"))


def plan(
    jobs: Annotated[
        list[Path],
        typer.Argument(
            metavar="JOB...", help="a job file (YAML or JSON), or several to plan together"
        ),
    ],
    pool: PoolFile = None,
    changes: Set = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option("--calibration", metavar="FILE", help="from `calibrate --out`"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="draw time against energy and cost, and the timeline of a step: .svg or .html",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="also other choices, each device's step, what was searched"),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the plan for a job: devices, batch shares, predicted time, energy and cost.

    For a job without a model, the plan is that of the recommended one. No device is leased.
    """
    from trainwright.tasks.allocate.preview import plan_and_estimate, plan_jobs
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.cli.screens.plans.joint_plan_screen import show_joint
    from trainwright.tasks.cli.screens.plans.plan_plot import check_plot, draw_plan
    from trainwright.tasks.cli.screens.plans.plan_screen import show_plan
    from trainwright.tasks.errors import BadInput, Infeasible
    from trainwright.tasks.estimate.calibrate import given
    from trainwright.tasks.recommend.step import completed
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.spec.job import load_job

    settings = Settings.from_environment()

    if plot is not None:
        if len(jobs) > 1:
            raise BadInput(f"--plot: got {plot} and {len(jobs)} jobs; pass one job with --plot")
        check_plot(plot)
    with console.working("reading calibrations"):
        measured = [given(file) for file in calibration or []]
    loaded = [load_job(job, pool, changes or ()) for job in jobs]
    if len(jobs) > 1:
        with (
            console.working("tracing the models, predicting, planning"),
            contextlib.ExitStack() as sources,
        ):
            whole = [sources.enter_context(completed(one, settings, measured)) for one in loaded]
            joint = plan_jobs(whole, settings, measured)
        if as_json and joint.feasible:
            print_model(joint)
        elif not as_json:
            show_joint(joint)
        if joint.slips:
            raise Infeasible(
                _why_late(joint),
                binding="deadline",
                slips=joint.slips,
                late_alone=joint.late_alone,
                plan=joint.model_dump(mode="json"),
            )
        return
    with (
        console.working("tracing the model, predicting, planning"),
        completed(loaded[0], settings, measured) as whole_job,
    ):
        result, estimate = plan_and_estimate(whole_job, settings, measured)
    if plot is not None:
        draw_plan(result, estimate, plot)
    if as_json:
        print_model(result)
        return
    show_plan(result, everything=everything)


def _why_late(joint: JointPlan) -> str:
    together = [name for name in joint.slips if name not in joint.late_alone]
    late = [f"job {name}, even alone: {why}" for name, why in joint.late_alone.items()]
    if together:
        late.append(
            f"no feasible plan: {', '.join(together)} cannot meet the deadline "
            "together with the others"
        )
    return "; ".join(late)
