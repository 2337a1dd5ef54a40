"""Commands that look before a run begins: validate, plan, pool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.tasks.commands.options import Debug, JobFile, Json, PoolFile, print_json, print_model

if TYPE_CHECKING:
    from trainwright.tasks.artefacts import JointPlan


def validate(job: JobFile, pool: PoolFile = None, as_json: Json = False, debug: Debug = False) -> None:
    """Check a job's data against its expectations."""
    from trainwright.tasks import alone, screen
    from trainwright.tasks.errors import DataRejected
    from trainwright.tasks.job import load_job
    from trainwright.tasks.validate import failure_line

    with screen.err.status("checking the data with Great Expectations"):
        result = alone.validate_job(load_job(job, pool))
    if as_json and result.success:
        print_model(result)
    elif not as_json:
        rows = [
            ("met" if one.success else "FAILED", one.column or "", _phrase(one.expectation), _short(one.observed))
            for one in result.expectations
        ]
        title = f"{result.checked_rows} rows, suite {result.suite_source}"
        screen.table(title, ("", "column", "expectation", "observed"), rows)
        for one in result.expectations:
            for row in one.sample_rows:
                screen.out.print(f"  {one.expectation} {one.column or ''}: {row}", markup=False)
    if not result.success:
        raise DataRejected(failure_line(result), validation=result.model_dump(mode="json"))


def _phrase(expectation: str) -> str:
    return expectation.removeprefix("expect_").removeprefix("column_").replace("_", " ")


def _short(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else text[:21] + "..."


def plan(
    jobs: Annotated[
        list[Path], typer.Argument(metavar="JOB...", help="a job file (YAML or JSON), or several to plan together")
    ],
    pool: PoolFile = None,
    calibration: Annotated[
        list[Path] | None, typer.Option("--calibration", metavar="FILE", help="from `calibrate --out`")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="draw time against energy and cost: .svg or .html")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say which devices a job would get, with what shares, and what that would take. Takes nothing."""
    from trainwright.tasks import alone, screen
    from trainwright.tasks.allocate.plot import write_front
    from trainwright.tasks.calibrate import given
    from trainwright.tasks.errors import BadInput, Infeasible
    from trainwright.tasks.job import load_job

    if plot is not None and (len(jobs) > 1 or plot.suffix not in (".svg", ".html")):
        allowed = "one job with --plot" if len(jobs) > 1 else "a file that ends in .svg or .html"
        raise BadInput(f"--plot: got {plot}; allowed: {allowed}")
    measured = [given(file) for file in calibration or []]
    if len(jobs) > 1:
        with screen.err.status("tracing the models, predicting, planning"):
            joint = alone.plan_jobs([load_job(job, pool) for job in jobs], measured)
        if as_json and joint.feasible:
            print_model(joint)
        elif not as_json:
            _show_joint(joint)
        if joint.slips:
            raise Infeasible(
                f"no feasible plan: {', '.join(joint.slips)} can not meet the deadline together with the others",
                binding="deadline", slips=joint.slips, plan=joint.model_dump(mode="json"),
            )  # fmt: skip
        return
    with screen.err.status("tracing the model, predicting, planning"):
        result = alone.plan_job(load_job(jobs[0], pool), measured)
    if plot is not None:
        write_front(result, plot)
    if as_json:
        print_model(result)
        return
    rows = [
        (
            device.id,
            str(device.batch_size),
            screen.interval(device.step_time_s.model_dump(), screen.seconds),
            screen.size(device.peak_memory_bytes),
        )
        for device in result.devices
    ]
    screen.table(
        f"devices, global batch {result.global_batch_size}",
        ("device", "batch", "own step time (90 % interval)", "memory"),
        rows,
        right=(1, 2, 3),
    )
    predicted = result.predicted.model_dump() if result.predicted else {}
    facts = [
        ("step time", screen.interval(predicted.get("step_time_s"), screen.seconds)),
        ("duration", screen.interval(predicted.get("duration_s"), screen.seconds)),
        ("energy", screen.interval(predicted.get("energy_j"), lambda value: screen.amount(value, "J"))),
        ("cost", screen.interval(predicted.get("cost"), lambda value: f"{value:.4g}")),
        ("deadline", screen.seconds(result.deadline_s)),
    ]
    screen.facts(f"predicted, least {result.objective}: median (90 % interval)", facts)
    rows = [
        (_shape(other.devices), str(other.global_batch_size),
         screen.seconds(other.predicted.duration_s.median if other.predicted else None), other.reason)
        for other in result.alternatives
    ]  # fmt: skip
    if rows:
        screen.table("alternatives", ("devices", "batch", "duration", "why not"), rows, right=(1, 2))
    points = [
        ("*" if one.chosen else "" if one.feasible else "misses a limit", _shape(one.devices), screen.seconds(one.time),
         screen.amount(one.energy, "J"), "-" if one.cost is None else f"{one.cost:.4g}")
        for one in result.front
    ]  # fmt: skip
    if len(points) > 1:
        screen.table(
            "time against energy and cost (* the plan)",
            ("", "devices", "duration", "energy", "cost"),
            points,
            right=(2, 3, 4),
        )
    found = (
        "nothing is better" if result.search == "exact" else f"nothing is better by more than {100 * result.gap:.2g} %"
    )
    screen.facts("search", [("", f"{found}; {result.solve_time_s:.2f} s"), ("global batch", result.batch_rule or "")])


def _shape(devices: dict[str, int]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in devices.items())


def _show_joint(joint: JointPlan) -> None:
    from trainwright.tasks import screen
    from trainwright.tasks.allocate.several import shape

    rows = [
        (one.job, shape(one), str(one.global_batch_size), screen.seconds(one.starts_s), screen.seconds(one.ends_s),
         screen.seconds(one.deadline_s) + (" SLIPS" if one.slips else ""),
         screen.amount(one.predicted.energy_j.median if one.predicted.energy_j else None, "J"))
        for one in joint.jobs
    ]  # fmt: skip
    screen.table(
        f"{len(joint.jobs)} jobs, {screen.amount(joint.energy_j, 'J')} together ({joint.search})",
        ("job", "devices", "batch", "starts", "ends by", "deadline", "energy"), rows, right=(2, 3, 4, 5, 6),
    )  # fmt: skip


def pool(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="a pool file; default: this machine")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a pool's devices and who holds them."""
    import time

    from trainwright.tasks import screen
    from trainwright.tasks.pool import load_pool
    from trainwright.tasks.step import ledger

    chosen = load_pool(file)
    held = {lease.resource: lease for lease in ledger().held("device ")}
    documents = []
    for device in chosen.devices():
        lease = held.get(device.resource)
        documents.append(
            device.model_dump()
            | {
                "holder": lease.holder if lease else None,
                "run": lease.run if lease else None,
                "expires_in_s": round(lease.expires_at - time.time(), 1) if lease else None,
            }
        )
    if as_json:
        print_json({"pool": chosen.name, "devices": documents})
        return
    rows = [
        (
            str(one["id"]),
            str(one["type"]),
            f"{one['cores']:g}" if one["cores"] else "",
            str(one["address"]),
            one["holder"] or "free",
            one["run"] or "",
        )
        for one in documents
    ]
    screen.table(f"pool {chosen.name}", ("device", "type", "cores", "host", "held by", "for"), rows, right=(2,))
