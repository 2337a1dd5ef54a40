"""The steps of a run, bound to its folder: each reads what it needs there, does its work, adds its artefact.

    open -> validate -> extract -> estimate -> allocate -> search_lr -> train -> (release) -> store -> analyze

Each returns a small JSON-able reference: the run, the artefact, a summary. A step whose artefact is there and still true is not
done again. Operators and the command line call these; the work itself is in the module of the step's name.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from pydantic import BaseModel

from trainwright.estimator.source import BatchSpec
from trainwright.estimator.structure import Structure
from trainwright.tasks import progress
from trainwright.tasks.allocate.ledger import Heartbeat, Holder, Ledger
from trainwright.tasks.allocate.planner import make_plan, usable
from trainwright.tasks.artefacts import (
    DataSchema,
    Estimate,
    LearningRateSearch,
    Manifest,
    Plan,
    Report,
    Result,
    Validation,
)
from trainwright.tasks.errors import BadInput, DataRejected, Interrupted, RunHeld, TrainwrightError
from trainwright.tasks.job import Job
from trainwright.tasks.pool import Device, load_pool
from trainwright.tasks.run import Run, final_state, list_runs, open_run
from trainwright.tasks.settings import settings

Reference = dict[str, Any]
P = ParamSpec("P")
Step = Callable[Concatenate[Run, P], Reference]

stop = threading.Event()
"""Set by whoever wants the running step to end (a signal handler, Airflow's on_kill)."""


def ledger() -> Ledger:
    """The ledger that the settings name."""
    return Ledger(settings().ledger_url)


def holder(default: str) -> Holder:
    """In whose name leases are taken: who started this process says, else the default."""
    config = settings()
    return Holder(config.holder or default, config.holder_pid)


def open_for(job: Job, owner: Holder, *, store: str | None = None, new: bool = False) -> Run:
    """The run that works on this job (see `tasks.run.open_run`), its pool checked too."""
    load_pool(job.pool)
    for field in job.not_yet_acted_on():
        progress.emit("notice", message=f"{field}: read, but not acted on in this version")
    return open_run(job, store or settings().store, owner, new=new)


def step(name: str, *, last: bool = False) -> Callable[[Step[P]], Step[P]]:
    """Note in the run's status that a step runs, how long it took, how it ended; keep the run's hold alive meanwhile."""

    def decorate(work: Step[P]) -> Step[P]:
        @functools.wraps(work)
        def wrapped(run: Run, /, *args: P.args, **kwargs: P.kwargs) -> Reference:
            started = time.monotonic()
            progress.emit("step", name=name, state="started", run=run.uri)
            if not ledger().renew(run.uri, [run.hold]):
                ledger().take([run.hold], holder(run.status().holder), run.uri)
            run.note(state="running", step=name, error=None)
            try:
                if stop.is_set():
                    raise Interrupted(f"{name}: stopped before it began")
                with Heartbeat(ledger(), run.uri, [run.hold]) as beat:
                    reference = work(run, *args, **kwargs)
                if beat.lost.is_set():
                    raise RunHeld(f"{run.uri}: the hold on this run was lost while {name} ran")
                seconds = time.monotonic() - started
                before = run.status().steps
                steps = before | {name: round(before.get(name, 0.0) + seconds, 3)}  # a step done again took both times
                run.note(steps=steps, **({"state": "success", "step": None} if last else {}))
                progress.emit("step", name=name, state="done", seconds=seconds, summary=reference)
            except BaseException as error:
                _note_failure(run, name, error)
                raise
            return {"run": run.uri, **reference}

        return wrapped

    return decorate


def _note_failure(run: Run, name: str, error: BaseException) -> None:
    """Write down how a step ended, give up the hold, and tell whoever watches."""
    ours = (
        error if isinstance(error, TrainwrightError) else TrainwrightError(f"{name}: {type(error).__name__}: {error}")
    )
    if isinstance(error, KeyboardInterrupt):
        ours = Interrupted(f"{name}: interrupted")
    progress.emit("step", name=name, state="failed", error=ours.document())
    run.note(state=final_state(ours), step=name, error=ours.document())
    ledger().release(run.uri, [run.hold])


@step("validate")
def validate(run: Run) -> Reference:
    """Check the data. Raises DataRejected, after storing the result, where it does not meet its expectations."""
    from trainwright.tasks import data
    from trainwright.tasks.validate import failure_line
    from trainwright.tasks.validate import validate as check

    job = run.job()
    earlier = run.find(Validation)
    kept_key = f"suites/{job.name}.json"
    root = run.root()
    if earlier is not None and earlier.success and earlier.data is not None:
        if data.load(job.data).schema.sha256 == earlier.data.sha256:
            return _validation_reference(earlier)
        if run.find(Plan) is not None:
            raise BadInput(f"{job.data.uri}: the data changed since {run.uri} began; --new starts afresh with it")
    try:
        kept = None if job.data.expectations else json.loads(root.get(kept_key))
    except FileNotFoundError:
        kept = None
    validation = check(job.data, seed=job.train.seed, kept_suite=kept)
    run.write(validation)
    if not validation.success:
        raise DataRejected(failure_line(validation), artefact=f"{run.uri}/{Validation.FILE}")
    if validation.suite_source == "inferred":
        root.create(kept_key, json.dumps(validation.suite, indent=1).encode())
    return _validation_reference(validation)


def _validation_reference(validation: Validation) -> Reference:
    return {
        "artefact": Validation.FILE,
        "success": validation.success,
        "expectations": len(validation.expectations),
        "rows": validation.data.rows if validation.data else 0,
        "suite": validation.suite_source,
    }


def batch_spec(schema: DataSchema) -> BatchSpec:
    """The estimator's view of the data."""
    return BatchSpec(
        inputs=schema.inputs,
        input_dtypes=schema.input_dtypes,
        target_dtype=schema.target_dtype,
        classes=len(schema.classes) if schema.classes else None,
        task=schema.task,
    )


@step("extract")
def extract(run: Run) -> Reference:
    """Read the model's structure from its code."""
    from trainwright.tasks.extract import extract as trace

    job = run.job()
    structure = run.find(Structure)
    if structure is None:
        folder, entry = run.source()
        structure = trace(
            folder,
            entry,
            job.model.config if job.model else {},
            batch_spec=batch_spec(checked_data(run)),
            optimizer=job.train.optimizer,
            precision=job.train.precision,
        )
        run.write(structure)
    return {
        "artefact": Structure.FILE,
        "parameters": structure.parameters,
        "forward_flops_per_sample": structure.forward_flops_per_sample,
        "operations": sum(structure.operations.values()),
    }


def checked_data(run: Run) -> DataSchema:
    """What the data looks like, by the run's validation. Raises DataRejected where there is no successful one."""
    validation = run.find(Validation)
    if validation is None or not validation.success or validation.data is None:
        raise DataRejected(f"{run.uri}: the data has not passed validation; run `validate` first")
    return validation.data


@step("estimate")
def estimate(run: Run) -> Reference:
    """Predict time, memory and energy on each kind of device of the pool."""
    from trainwright.tasks.estimate import estimate as predict

    found = run.find(Estimate)
    if found is None:
        job = run.job()
        pool = load_pool(job.pool)
        found = predict(run.read(Structure), usable(pool, job.devices), power=pool.power)
        run.write(found)
    return {"artefact": Estimate.FILE, "mode": found.mode, "device_kinds": len(found.curves)}


def resource(device: Device) -> str:
    """The ledger's name of a device: the same in every pool that lists it so."""
    return f"device {device.address} {device.id}"


def resources(plan: Plan) -> list[str]:
    """The ledger's names of a plan's devices."""
    return [resource(device) for device in plan.devices]


@step("allocate")
def allocate(run: Run, replay: str | None = None) -> Reference:
    """Choose the devices and each one's share of the batch, and lease them.

    A run that goes on keeps its plan. Raises Infeasible, or RunHeld where another run holds the devices.
    """
    job = run.job()
    plan = run.find(Plan)
    if plan is None and replay is not None:
        plan = Run(replay).read(Plan)
    if plan is None:
        pool = load_pool(job.pool)
        devices = usable(pool, job.devices)
        held = {lease.resource: lease for lease in ledger().held("device ") if lease.run != run.uri}
        free = [device for device in devices if resource(device) not in held]
        if len(free) < job.devices.min_count and held:
            lease = next(iter(held.values()))
            raise RunHeld(
                f"devices: {len(free)} free, at least {job.devices.min_count} needed; {lease.resource} is held by "
                f"{lease.holder} for {lease.run}",
                holder=lease.holder, run=lease.run,
            )  # fmt: skip
        plan = make_plan(job, pool, run.read(Estimate), checked_data(run), free)
    ledger().take(resources(plan), holder(run.status().holder), run.uri)
    run.write(plan)
    return {
        "artefact": Plan.FILE,
        "feasible": plan.feasible,
        "devices": {device.id: device.batch_size for device in plan.devices},
        "global_batch_size": plan.global_batch_size,
        "predicted_duration_s": plan.predicted.duration_s.median if plan.predicted else None,
    }


def release(run: Run) -> Reference:
    """Give the run's devices back, whatever became of it."""
    plan = run.find(Plan)
    count = ledger().release(run.uri, resources(plan)) if plan is not None else 0
    progress.emit("step", name="release", state="done", seconds=0.0, summary={"released": count})
    return {"run": run.uri, "released": count}


def _request(run: Run) -> Any:
    from trainwright.tasks.train import TrainRequest

    folder, entry = run.source()
    search = run.find(LearningRateSearch)
    return TrainRequest(
        job=run.job(),
        plan=run.read(Plan),
        learning_rate=search.learning_rate if search else 0.0,
        schema=checked_data(run),
        source_folder=str(folder),
        entry=entry,
        run_uri=run.uri,
        work_folder=str(run.work_folder()),
        replay_events=None,
        resume=True,
    )


@step("search_lr")
def search_lr(run: Run, replay: str | None = None) -> Reference:
    """Find the learning rate on the real model and data, on the leased devices."""
    from trainwright.tasks.search_lr import plot, search_learning_rate

    search = run.find(LearningRateSearch)
    if search is None:
        given = run.job().train.learning_rate
        if replay is not None:
            search = Run(replay).read(LearningRateSearch).model_copy(update={"source": "replayed"})
        elif given != "auto":
            search = LearningRateSearch(
                learning_rate=given, interval=(given, given), source="given", reason="the job names it"
            )
        else:
            with Heartbeat(ledger(), run.uri, resources(run.read(Plan))):
                search = search_learning_rate(_request(run), stop=stop)
            run.objects.put("lr_search.html", plot(search).encode())
        run.write(search)
    return {
        "artefact": LearningRateSearch.FILE,
        "learning_rate": search.learning_rate,
        "interval": list(search.interval),
        "source": search.source,
    }


@step("train")
def train(run: Run, replay: str | None = None) -> Reference:
    """Train on the leased devices, from the newest checkpoint where there is one."""
    from trainwright.tasks.train import train as run_training

    result = run.find(Result)
    if result is None:
        request = _request(run)
        if replay is not None:
            request = request.model_copy(update={"replay_events": Run(replay).read(Result).split_events})
        names = resources(request.plan)
        ledger().take(names, holder(run.status().holder), run.uri)
        with Heartbeat(ledger(), run.uri, [*names, run.hold]) as beat:
            result = run_training(request, stop=stop, still_mine=lambda: not beat.lost.is_set())
        run.write(result)
    return {
        "artefact": Result.FILE,
        "state": result.state,
        "metrics": result.metrics,
        "devices": {device.id: device.batch_size for device in result.devices},
        "target_reached": result.target_reached,
    }


@step("store")
def store(run: Run) -> Reference:
    """Put the model into the run folder and seal it; read it back."""
    from trainwright.tasks.store import save_model, seal, verify

    if not run.finished():
        save_model(run)
        seal(run)
    manifest = verify(run)
    return {
        "artefact": manifest.FILE,
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files.values()),
        "verified": True,
    }


@step("analyze", last=True)
def analyze(run: Run) -> Reference:
    """Analyse this run beside all earlier ones, and write the report."""
    from trainwright.tasks.analyze import analyze as report_on

    report = report_on(run, run.store_uri)
    ledger().release(run.uri)
    return {"artefact": Report.FILE, "report": f"{run.uri}/{report.html}", "runs_compared": report.runs_compared}


ORDER: dict[str, tuple[Callable[..., Reference], type[BaseModel]]] = {
    "validate": (validate, Validation),
    "extract": (extract, Structure),
    "estimate": (estimate, Estimate),
    "allocate": (allocate, Plan),
    "search_lr": (search_lr, LearningRateSearch),
    "train": (train, Result),
    "store": (store, Manifest),
    "analyze": (analyze, Report),
}
"""The steps in their order, and the artefact that says a step is done."""


def do(run: Run, name: str, replay: str | None = None) -> Reference:
    """Do a step, and before it those of the run's earlier steps that were not done yet."""
    for earlier, (work, artefact) in ORDER.items():
        if earlier == name:
            break
        if not run.has(artefact):
            _call(work, run, replay)
    return _call(ORDER[name][0], run, replay)


def _call(work: Callable[..., Reference], run: Run, replay: str | None) -> Reference:
    return work(run, replay) if work in (allocate, search_lr, train) else work(run)


def summary(run: Run) -> dict[str, Any]:
    """What `run` and `show` print of a run: state, metrics, predicted and measured side by side, where things are."""
    status, result, plan, search = run.status(), run.find(Result), run.find(Plan), run.find(LearningRateSearch)
    files = {item.key for item in run.objects.list("report/")}
    document: dict[str, Any] = {
        "run": run.uri,
        "job": run.job_name,
        "state": status.state,
        "holder": status.holder,
        "started_at": status.started_at,
        "metrics": result.metrics if result else {},
        "predicted": plan.predicted.model_dump(mode="json") if plan and plan.predicted else None,
        "measured": result.measured.model_dump(mode="json") if result else None,
        "steps": status.steps,
        "devices": [device.model_dump(mode="json") for device in result.devices] if result else [],
        "planned": [device.model_dump(mode="json") for device in plan.devices] if plan else [],
        "learning_rate": search.learning_rate if search else None,
        "global_batch_size": plan.global_batch_size if plan else None,
        "target_reached": result.target_reached if result else None,
        "split_events": [event.model_dump(mode="json") for event in result.split_events] if result else [],
        "checkpoints": [f"{run.uri}/{checkpoint.path}" for checkpoint in result.checkpoints] if result else [],
        "report": f"{run.uri}/report/report.html" if "report/report.html" in files else None,
        "manifest": f"{run.uri}/manifest.json" if run.finished() else None,
    }
    if status.error is not None:
        document["error"] = status.error
    return document


def replayed(run_uri: str, job: Job) -> str:
    """The URI of a run to replay, checked: finished training, the same job. Raises BadInput."""
    earlier = Run(run_uri)
    if not earlier.exists() or earlier.find(Result) is None:
        raise BadInput(f"--replay: got {run_uri}; allowed: a run whose training has finished")
    if earlier.job_name != job.name:
        raise BadInput(f"--replay: got a run of job {earlier.job_name}; allowed: one of {job.name}")
    return earlier.uri


def resolve(given: str, store: str | None = None) -> Run:
    """The run of a URI, or of an id as `runs` prints it. Raises BadInput where there is none."""
    if "://" in given:
        run = Run(given)
        if not run.exists():
            raise BadInput(f"run: got {given}; there is no such run")
        return run
    for run in list_runs(store or settings().store):
        if run.id == given:
            return run
    raise BadInput(f"run: got {given!r}; allowed: a run's URI, or an id that `trainwright runs` lists")
