"""Commands that look before a run begins: validate, plan, pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.tasks.commands.options import Debug, JobFile, Json, PoolFile, print_json, print_model

if TYPE_CHECKING:
    from trainwright.tasks.artefacts import Alternative, JointPlan

_ALTERNATIVES_SHOWN = 6


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
        with screen.working("tracing the models, predicting, planning"):
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
    with screen.working("tracing the model, predicting, planning"):
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
            device.mode or "-",
        )
        for device in result.devices
    ]
    screen.table(
        f"devices, global batch {result.global_batch_size}",
        ("device", "batch", "own step time (90 % interval)", "memory", "predicted by"),
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
    _show_alternatives(result.alternatives, result.global_batch_size)
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


def _show_alternatives(alternatives: Sequence[Alternative], batch: int) -> None:
    from trainwright.tasks import screen

    rows = [
        (_shape(one.devices) + (f", batch {one.global_batch_size}" if one.global_batch_size != batch else ""),
         screen.seconds(one.predicted.duration_s.median),
         screen.amount(one.predicted.energy_j.median if one.predicted.energy_j else None, "J"),
         f"{one.predicted.cost.median:.4g}" if one.predicted.cost else "-", one.reason)
        for one in alternatives[:_ALTERNATIVES_SHOWN] if one.predicted is not None
    ]  # fmt: skip
    if not rows:
        return
    more = len(alternatives) - len(rows)
    title = "alternatives" + (f" ({more} more with --json)" if more else "")
    screen.table(title, ("devices", "duration", "energy", "cost", "why not"), rows, right=(1, 2, 3))


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
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE|probe]", help="a pool file (default: this machine); `probe` finds devices"),
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option("--host", metavar="ADDRESS", help="with probe: a host, by ssh; again for more")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="with probe: write the pool file")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a pool's devices, who holds them until when, and who waits; or `pool probe`: find devices, make a pool file."""
    from trainwright.tasks import alone, screen
    from trainwright.tasks.errors import BadInput
    from trainwright.tasks.pool import load_pool

    if file is not None and str(file) == "probe":
        _probe(host or [], out, as_json)
        return
    if host or out:
        raise BadInput("pool: --host and --out go with `pool probe`")
    document = alone.pool_document(load_pool(file))
    queue = document["queue"]
    if as_json:
        print_json(document)
        return
    rows = [
        (
            str(one["id"]),
            str(one["type"]),
            f"{one['cores']:g}" if one["cores"] else "",
            str(one["address"]),
            one["holder"] or "free",
            f"{one['until'][11:19]} UTC, unless renewed" if one["until"] else "",
            one["run"] or "",
        )
        for one in document["devices"]
    ]
    screen.table(
        f"pool {document['pool']}", ("device", "type", "cores", "host", "held by", "until", "for"), rows, right=(2,)
    )
    if queue:
        waits = [
            (str(one["place"]), str(one["holder"]), str(one["priority"]), screen.seconds(one["waited_s"]),
             f"{one['needed']} of {len(one['wanted'])}", str(one["run"]))
            for one in queue
        ]  # fmt: skip
        screen.table("queue", ("place", "who", "priority", "waited", "devices", "for"), waits, right=(0, 2, 3))


def _probe(hosts: list[str], out: Path | None, as_json: bool) -> None:
    """Find devices; print the pool file, or write it."""
    import yaml

    from trainwright.tasks import screen
    from trainwright.tasks.errors import BadInput
    from trainwright.tasks.probe import probe

    found = probe(hosts)
    document = {
        "name": found.name,
        "hosts": [
            {"name": one.name, "address": one.address,
             "devices": [entry.model_dump(exclude_none=True) for entry in one.devices]}
            for one in found.hosts
        ],
    }  # fmt: skip
    text = yaml.safe_dump(document, sort_keys=False)
    if out is not None:
        try:
            out.write_text(text)
        except OSError as error:
            raise BadInput(f"--out: {out}: can't be written ({error.strerror})") from None
    if as_json:
        print_json(document)
    elif out is None:
        screen.out.print(text, markup=False, end="")
    else:
        screen.err.print(f"saved to {out}")
