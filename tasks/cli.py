"""The command line. Commands read arguments, call a step, print; what they do is elsewhere in `trainwright.tasks`.

Exit codes: 0 done, 1 the work failed, 2 bad input, 3 no feasible plan, 4 a service can't be reached, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.estimator.errors import BadInput, TrainwrightError

if TYPE_CHECKING:
    from pydantic import BaseModel

app = typer.Typer(
    name="trainwright",
    help="From data and a model to a trained, stored, analysed model, on the devices you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="a job file (YAML or JSON)")]
PoolFile = Annotated[Path | None, typer.Option("--pool", metavar="FILE", help="a pool file; overrides the job's")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
Store = Annotated[
    str | None, typer.Option("--store", metavar="URI", help="where runs are kept; default: TRAINWRIGHT_STORE")
]


def main() -> None:
    """Run a command; an error is one line on stderr (and a JSON document on stdout with --json) and an exit code."""
    wants_json, debug = "--json" in sys.argv, "--debug" in sys.argv
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except TrainwrightError as error:
        _fail(error, wants_json, debug)
    except KeyboardInterrupt:
        from trainwright.tasks.errors import Interrupted

        _fail(Interrupted("interrupted"), wants_json, debug)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read us has gone
        sys.exit(1)
    except (typer.Abort, typer.Exit) as error:
        sys.exit(getattr(error, "exit_code", 130))
    except Exception as error:  # noqa: BLE001 - the outermost boundary: reports, with the traceback on request
        usage = getattr(error, "format_message", None)  # click's usage errors
        known = (
            BadInput(usage()) if usage else TrainwrightError(f"{type(error).__name__}: {error} (--debug shows where)")
        )
        _fail(known, wants_json, debug)


def _fail(error: TrainwrightError, wants_json: bool, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    if wants_json:
        _print_json({"error": error.document()} | ({"feasible": False} if error.kind == "infeasible" else {}))
    print(f"trainwright: {error}", file=sys.stderr)  # noqa: T201
    sys.exit(error.exit_code)


def _print_json(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False, default=str) + "\n")
    sys.stdout.flush()


def _print_model(model: BaseModel, **options: Any) -> None:
    _print_json(model.model_dump(mode="json", **options))


@app.command()
def run(
    job: JobFile,
    pool: PoolFile = None,
    new: Annotated[bool, typer.Option("--new", help="start afresh instead of continuing an unfinished run")] = False,
    replay: Annotated[
        str | None, typer.Option("--replay", metavar="RUN", help="use a run's plan, learning rate, splits")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Do the whole chain for a job, through Airflow: validate, size, train, store, analyse."""
    from trainwright.tasks import screen, steps
    from trainwright.tasks.job import load_job
    from trainwright.tasks.launch_dag import ensure_store, run_job
    from trainwright.tasks.settings import settings

    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs start with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    chosen = load_job(job, pool)
    if chosen.model is None:
        raise BadInput(f"{job}: model: missing, and needed by this step")
    if replay is not None:
        ensure_store(settings().store)
        replay = steps.resolve(replay).uri
    with screen.Watch() as watch:
        done = run_job(chosen, new=new, replay=replay, watch=watch)
    document = steps.summary(done)
    _print_json(document) if as_json else screen.show_run(document)


@app.command()
def validate(job: JobFile, pool: PoolFile = None, as_json: Json = False, debug: Debug = False) -> None:
    """Check a job's data against its expectations."""
    from trainwright.tasks import alone, screen
    from trainwright.tasks.errors import DataRejected
    from trainwright.tasks.job import load_job
    from trainwright.tasks.validate import failure_line

    with screen.err.status("checking the data with Great Expectations"):
        result = alone.validate_job(load_job(job, pool))
    if as_json and result.success:
        _print_model(result)
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


@app.command()
def extract(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="path/to/model.py or package.module")],
    batch_size: Annotated[int, typer.Option("--batch-size", help="samples in the traced step")] = 32,
    config: Annotated[
        list[str] | None, typer.Option("--config", metavar="k=v", help="an argument of build_model")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw")] = "adamw",
    precision: Annotated[str, typer.Option(help="fp32 or fp64")] = "fp32",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read a model's structure from its code, without allocating it."""
    from trainwright.tasks import screen

    with screen.err.status("tracing a training step"):
        structure = _structure(model, batch_size, config, optimizer, precision)
    if as_json:
        _print_model(structure)
        return
    rows = [
        (
            layer.name,
            layer.kind,
            "x".join(map(str, layer.output_shape)),
            f"{layer.parameters:,}",
            screen.amount(layer.forward_flops, "FLOP"),
        )
        for layer in structure.layers
    ]
    screen.table(
        f"{model} at batch {structure.batch_size}",
        ("layer", "kind", "output", "parameters", "forward"),
        rows,
        right=(2, 3, 4),
    )
    facts = [
        ("parameters", f"{structure.parameters:,}"),
        ("forward, a sample", screen.amount(structure.forward_flops_per_sample, "FLOP")),
        ("activations, a sample", screen.size(structure.activation_bytes_per_sample)),
        ("operations in a step", str(sum(structure.operations.values()))),
        ("read by", structure.method),
    ]
    screen.facts("in all", facts)


def _structure(model: str, batch_size: int, config: list[str] | None, optimizer: str, precision: str) -> Any:
    from trainwright.estimator.structure import Structure
    from trainwright.tasks import alone
    from trainwright.tasks.documents import parse_text, validated
    from trainwright.tasks.job import ModelSpec, Optimizer, TrainSpec

    if model.endswith(".json"):
        from pydantic import ValidationError

        try:
            return Structure.model_validate_json(Path(model).read_bytes())
        except (OSError, ValidationError, ValueError) as error:
            raise BadInput(f"{model}: not a structure.json ({type(error).__name__})") from None
    arguments: dict[str, Any] = {}
    for one in config or []:
        name, equals, value = one.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"--config: got {one!r}; allowed: name=value")
        arguments |= parse_text(f"{name}: {value}", "--config")
    spec = validated(ModelSpec, {"source": model, "config": arguments}, "model")
    rule = validated(Optimizer, {"name": optimizer}, "--optimizer")
    chosen = validated(TrainSpec, {"precision": precision}, "--precision").precision
    return alone.extract_model(spec, batch_size=batch_size, optimizer=rule, precision=chosen)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="where the calibration is written")],
    budget: Annotated[float, typer.Option(help="seconds to measure")] = 90.0,
    device: Annotated[str, typer.Option(help="cpu or cuda:0")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine, so that estimates are of it."""
    from trainwright.tasks import screen
    from trainwright.tasks.calibrate import calibrate as measure

    with screen.err.status(f"measuring for up to {budget:.0f} s"):
        result = measure(out, budget_s=budget, device=device, threads=threads)
    if as_json:
        _print_model(result)
        return
    error = result.cross_validated_error
    facts = [
        ("measurements", str(result.measurements)),
        ("error, cross-validated", f"median {100 * error.median:.0f} %, p90 {100 * error.p90:.0f} %"),
        ("drift of the machine", f"{100 * result.sentinel_drift:.1f} %"),
        ("took", screen.seconds(result.duration_s)),
        ("written to", str(out)),
    ]
    screen.facts(f"{result.device_type}, {threads} thread(s)", facts)


@app.command()
def estimate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="path/to/model.py, package.module or structure.json")],
    batch_size: Annotated[int, typer.Option("--batch-size", help="samples in a step")],
    calibration: Annotated[
        Path | None, typer.Option("--calibration", metavar="FILE", help="from `calibrate --out`")
    ] = None,
    device_type: Annotated[
        str | None, typer.Option("--device-type", metavar="NAME", help="a known device type")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option("--config", metavar="k=v", help="an argument of build_model")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw")] = "adamw",
    precision: Annotated[str, typer.Option(help="fp32 or fp64")] = "fp32",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict time, memory and energy of a training step on a device type."""
    from trainwright.estimator.calibration import load as load_calibration
    from trainwright.tasks import alone, screen

    if calibration is None and device_type is None:
        raise BadInput("estimate: give --calibration FILE or --device-type NAME")
    if batch_size < 1:
        raise BadInput(f"--batch-size: got {batch_size}; allowed: 1 or more")
    measured = load_calibration(calibration) if calibration is not None else None
    structure = _structure(model, batch_size, config, optimizer, precision)
    document = alone.estimate_step(structure, batch_size=batch_size, device_type=device_type, calibration=measured)
    if as_json:
        _print_json(document)
        return
    memory = document["peak_memory_bytes"]
    facts = [
        ("mode", f"{document['mode']}, coverage {100 * document['coverage']:.0f} %"),
        ("step time", screen.interval(document["step_time_s"], screen.seconds)),
        ("peak memory", f"{screen.size(memory['expected'])}  (safe: {screen.size(memory['safe'])})"),
        ("energy of a step", screen.interval(document["energy_j"], lambda value: screen.amount(value, "J"))),
        ("power known from", str(document["energy_source"])),
    ]
    screen.facts(f"{model} at batch {batch_size}: median (90 % interval)", facts)


@app.command()
def plan(
    job: JobFile,
    pool: PoolFile = None,
    calibration: Annotated[
        list[Path] | None, typer.Option("--calibration", metavar="FILE", help="from `calibrate --out`")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say which devices a job would get, with what shares, and what that would take. Takes nothing."""
    from trainwright.estimator.calibration import load as load_calibration
    from trainwright.tasks import alone, screen
    from trainwright.tasks.job import load_job

    measured = [load_calibration(file) for file in calibration or []]
    with screen.err.status("tracing the model, predicting, planning"):
        result = alone.plan_job(load_job(job, pool), measured)
    if as_json:
        _print_model(result)
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
        (", ".join(f"{count} x {kind}" for kind, count in other.devices.items()), str(other.global_batch_size),
         screen.seconds(other.predicted.duration_s.median if other.predicted else None), other.reason)
        for other in result.alternatives
    ]  # fmt: skip
    if rows:
        screen.table("alternatives", ("devices", "batch", "duration", "why not"), rows, right=(1, 2))


def _in_process(job: Path, pool: Path | None, store: str | None, name: str, plan_file: Path | None = None) -> Any:
    """Do a step of a job's run in this process, and what is missing before it; give the devices back."""
    from trainwright.tasks import progress, screen, steps
    from trainwright.tasks.allocate.ledger import Holder
    from trainwright.tasks.artefacts import Plan
    from trainwright.tasks.job import load_job
    from trainwright.tasks.launch_dag import ensure_store, holder_name
    from trainwright.tasks.settings import settings

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: steps.stop.set())
    chosen = load_job(job, pool)
    given = None
    if plan_file is not None:
        try:
            given = Plan.model_validate_json(plan_file.read_bytes())
        except (OSError, ValueError) as error:
            raise BadInput(f"--plan: {plan_file} is not a plan.json ({type(error).__name__})") from None
    ensure_store(store or settings().store)
    with screen.Watch() as watch:
        progress.listen(watch)
        run = steps.open_for(chosen, Holder(holder_name(), os.getpid()), store=store)
        watch({"event": "run", "run": run.uri})
        try:
            if given is not None:
                run.write(given)
            steps.do(run, name)
        finally:
            steps.ledger().release(run.uri)
    return run


@app.command("search-lr")
def search_lr(
    job: JobFile, pool: PoolFile = None, store: Store = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Find the learning rate on the real model and data, on leased devices."""
    from trainwright.tasks import screen
    from trainwright.tasks.artefacts import LearningRateSearch

    run = _in_process(job, pool, store, "search_lr")
    result = run.read(LearningRateSearch)
    if as_json:
        _print_model(result)
        return
    low, high = result.interval
    facts = [
        ("learning rate", f"{result.learning_rate:.3g}"),
        ("interval", f"{low:.2g} to {high:.2g}"),
        ("because", result.reason),
        ("run", run.uri),
    ]
    screen.facts("learning rate", facts)


@app.command()
def train(
    job: JobFile,
    pool: PoolFile = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="a plan.json to train by")] = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a job in this process's care, without Airflow; the steps before it are done where they are missing."""
    from trainwright.tasks import screen, steps

    run = _in_process(job, pool, store, "train", plan_file)
    run.note(state="success", step=None)
    document = steps.summary(run)
    _print_json(document) if as_json else screen.show_run(document)


@app.command()
def analyze(
    run_id: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="a run; default: the newest finished one")
    ] = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Analyse a finished run beside all earlier ones; write its report anew."""
    from trainwright.tasks import screen, steps
    from trainwright.tasks.analyze import analyze as report_on
    from trainwright.tasks.run import list_runs
    from trainwright.tasks.settings import settings

    if run_id is not None:
        chosen = steps.resolve(run_id, store)
    else:
        finished = (one for one in list_runs(store or settings().store) if one.finished())
        found = next(finished, None)
        if found is None:
            raise BadInput("analyze: the store holds no finished run; `trainwright run JOB` makes one")
        chosen = found
    report = report_on(chosen, chosen.store_uri)
    if as_json:
        _print_model(report)
        return
    lines = [
        ("run", report.run),
        ("report", f"{chosen.uri}/{report.html}"),
        ("compared with", f"{report.runs_compared} run(s)"),
    ]
    screen.facts("report", lines)


@app.command()
def runs(
    job: Annotated[str | None, typer.Argument(metavar="[JOB NAME]", help="of this job only")] = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the runs, newest first."""
    from trainwright.tasks import screen
    from trainwright.tasks.artefacts import Result, Status
    from trainwright.tasks.run import list_runs
    from trainwright.tasks.settings import settings

    documents: list[dict[str, Any]] = []
    for one in list_runs(store or settings().store, job):
        status, result = one.find(Status), one.find(Result)
        if status is not None:
            documents.append(
                {
                    "run": one.uri, "id": one.id, "job": one.job_name, "state": status.state, "step": status.step,
                    "started_at": status.started_at, "seconds": sum(status.steps.values()),
                    "metrics": result.metrics if result else {},
                }
            )  # fmt: skip
    if as_json:
        _print_json({"runs": documents})
        return
    rows = [
        (
            str(one["id"]), str(one["job"]), str(one["state"]) + (f" ({one['step']})" if one["step"] else ""),
            screen.seconds(one["seconds"]), _one_metric(one["metrics"]),
        )
        for one in documents
    ]  # fmt: skip
    screen.table(f"{len(rows)} run(s)", ("run", "job", "state", "steps took", "result"), rows, right=(3,))


def _one_metric(metrics: dict[str, float]) -> str:
    name = next((one for one in ("accuracy", "loss") if one in metrics), None)
    return f"{name} {metrics[name]:.4f}" if name else ""


@app.command()
def show(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="a run's id or URI")],
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="save the run's report to a file")
    ] = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a run: what was predicted and measured, where things are."""
    from trainwright.tasks import screen, steps

    chosen = steps.resolve(run_id, store)
    if report is not None:
        try:
            chosen.objects.get_file("report/report.html", report)
        except FileNotFoundError:
            raise BadInput(f"{chosen.uri}: has no report yet") from None
        screen.err.print(f"saved to {report}")
    document = steps.summary(chosen)
    _print_json(document) if as_json else screen.show_run(document)


@app.command()
def pool(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="a pool file; default: this machine")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a pool's devices and who holds them."""
    import time

    from trainwright.tasks import screen, steps
    from trainwright.tasks.pool import load_pool

    chosen = load_pool(file)
    held = {lease.resource: lease for lease in steps.ledger().held("device ")}
    documents = []
    for device in chosen.devices():
        lease = held.get(steps.resource(device))
        documents.append(
            device.model_dump()
            | {
                "holder": lease.holder if lease else None,
                "run": lease.run if lease else None,
                "expires_in_s": round(lease.expires_at - time.time(), 1) if lease else None,
            }
        )
    if as_json:
        _print_json({"pool": chosen.name, "devices": documents})
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


@app.command()
def up(as_json: Json = False, debug: Debug = False) -> None:
    """Start the embedded stack: S3 server, Airflow with its UI."""
    from trainwright.infra import local
    from trainwright.tasks import screen
    from trainwright.tasks.errors import ServiceUnreachable
    from trainwright.tasks.launch_dag import dags_folder
    from trainwright.tasks.settings import settings

    try:
        with screen.err.status("starting the S3 server and Airflow (a minute the first time)"):
            local.up(settings().home, dags_folder())
    except (OSError, TimeoutError) as error:
        raise ServiceUnreachable(str(error)) from error
    _stack(as_json)


@app.command()
def status(as_json: Json = False, debug: Debug = False) -> None:
    """Say what of the embedded stack runs, and where."""
    _stack(as_json)


@app.command()
def down(as_json: Json = False, debug: Debug = False) -> None:
    """Stop the embedded stack; what it stored stays."""
    from trainwright.infra import local
    from trainwright.tasks import screen
    from trainwright.tasks.settings import settings

    with screen.err.status("stopping Airflow and the S3 server"):
        local.down(settings().home)
    _stack(as_json)


def _stack(as_json: bool) -> None:
    from trainwright.infra import local
    from trainwright.tasks import screen
    from trainwright.tasks.settings import settings

    services = local.status(settings().home)
    if as_json:
        _print_json({"services": services})
        return
    rows = [(one["name"], one["state"], one.get("address") or "", one.get("note") or "") for one in services]
    screen.table("embedded stack", ("service", "state", "address", ""), rows)


if __name__ == "__main__":
    main()
