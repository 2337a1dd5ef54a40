"""The steps of a run, bound to its folder: each reads what it needs there, does its work, adds its artefact.

    open -> validate -> extract -> estimate -> allocate -> search_lr -> train -> (release) -> store -> analyze

Each returns a small JSON-able reference: the run, the artefact, a summary. A step whose artefact is there and still true is not
done again. Operators and the command line call these; the work itself is in the module of the step's name.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import BatchSpec
from trainwright.tasks import progress
from trainwright.tasks.allocate.acquire import Claim, Planner, lease, on_devices
from trainwright.tasks.allocate.replan import planner, predicted, replanner, require_devices
from trainwright.tasks.errors import BadInput, CorruptArtefact, DataRejected
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.artefacts import (
    DataSchema,
    Estimate,
    LearningRateSearch,
    Manifest,
    Plan,
    Report,
    Result,
    Validation,
)
from trainwright.tasks.runs.run import Run, open_run
from trainwright.tasks.settings import settings
from trainwright.tasks.spec.eligibility import require_possible, usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.step import Reference, act_as, holder, ledger, step
from trainwright.tasks.storage.objects import ObjectStore


def open_for(
    job: Job,
    owner: Holder,
    *,
    store: str | None = None,
    new: bool = False,
    worker: str | None = None,
    lacking: type[BaseModel] | None = None,
) -> Run:
    """The run that works on this job (see `tasks.run.open_run`), its pool checked too."""
    pool = load_pool(job.pool)
    require_possible(job, pool, usable(pool, job.devices))
    return open_run(
        job, store or settings().store, act_as(owner), new=new, worker=worker, lacking=lacking
    )


@step("validate")
def validate(run: Run) -> Reference:
    """Check the data. Raises DataRejected, after storing the result, where it does not meet its expectations."""
    from trainwright.tasks.data import dataset
    from trainwright.tasks.validate.check import failure_line
    from trainwright.tasks.validate.check import validate as check

    job = run.job()
    earlier = run.find(Validation)
    root = run.root()
    if earlier is not None and earlier.success and earlier.data is not None:
        if dataset.load(job.data).schema.sha256 == earlier.data.sha256:
            return _validation_reference(earlier)
        if run.find(Plan) is not None:
            raise BadInput(
                f"{job.data.uri}: the data changed since {run.uri} began; --new starts afresh with it"
            )
    validation = check(job.data, seed=job.train.seed, kept_suite=kept_suite(root, job))
    run.write(validation)
    if not validation.success:
        raise DataRejected(failure_line(validation), artefact=f"{run.uri}/{Validation.FILE}")
    if validation.suite_source == "inferred":
        root.create(_suite_key(job), json.dumps(validation.suite, indent=1).encode())
    return _validation_reference(validation)


def _suite_key(job: Job) -> str:
    return f"suites/{job.name}.json"


def kept_suite(root: ObjectStore, job: Job) -> list[dict[str, Any]] | None:
    """The suite that the job's first run inferred, which later data is held to; None where the job names its own."""
    try:
        return None if job.data.expectations else json.loads(root.get(_suite_key(job)))
    except FileNotFoundError:
        return None
    except ValueError:
        raise CorruptArtefact(
            f"{root.uri}/{_suite_key(job)}: not JSON; delete it to have it inferred anew"
        ) from None


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
    """Predict time, memory and energy on each kind of device of the pool, by what earlier runs taught too."""
    found = run.find(Estimate)
    if found is None:
        job = run.job()
        pool = load_pool(job.pool)
        # Told before this machine is measured.
        require_possible(job, pool, usable(pool, job.devices), checked_data(run).train_rows)
        found = predicted(run)
        run.write(found)
    return {
        "artefact": Estimate.FILE,
        "mode": found.mode,
        "device_kinds": len(found.curves),
        "learned_from": found.learned_from,
    }


@step("allocate")
def allocate(run: Run, replay: str | None = None) -> Reference:
    """Choose the devices and each one's share of the batch, and lease them; wait in the queue where others have them.

    A run that goes on keeps its plan, unless the pool no longer has its devices. Raises Infeasible, or RunHeld where the job's
    `queue_timeout` ended first.
    """
    stored = run.find(Plan)
    if stored is not None:
        plan = stored
        if not run.has(Result):  # what is trained needs no devices
            plan, _ = lease(run, stored, again=_replanner(run, replay))
    else:
        replayed = Run(replay).read(Plan) if replay is not None else None
        if replayed is not None:
            require_devices(replayed, run.job())
        plan, _ = lease(run, replayed or planner(run, checked_data(run)))
    if plan != stored:
        run.write(plan)
    return {
        "artefact": Plan.FILE,
        "feasible": plan.feasible,
        "devices": {device.id: device.batch_size for device in plan.devices},
        "global_batch_size": plan.global_batch_size,
        "predicted_duration_s": plan.predicted.duration_s.median if plan.predicted else None,
    }


def _replanner(run: Run, replay: str | None) -> Planner | None:
    """What plans anew where the devices of the run's plan are gone; a replay must not."""
    if replay is not None:
        require_devices(run.read(Plan), run.job())
        return None
    return replanner(run, checked_data(run))


def release(run: Run) -> Reference:
    """Give the run's devices back, whatever became of it."""
    plan = run.find(Plan)
    count = (
        ledger().release(run.uri, plan.resources, holder=holder(run).name)
        if plan is not None
        else 0
    )
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
    from trainwright.tasks.search_lr.learning_rate import search_learning_rate
    from trainwright.tasks.search_lr.plot import plot

    search = run.find(LearningRateSearch)
    if search is None:
        given = run.job().train.learning_rate
        if replay is not None:
            search = Run(replay).read(LearningRateSearch).model_copy(update={"source": "replayed"})
        elif given != "auto":
            search = LearningRateSearch(
                learning_rate=given,
                interval=(given, given),
                source="given",
                reason="the job names it",
            )
        else:
            search = on_devices(
                run,
                lambda halt, _: search_learning_rate(_request(run), stop=halt),
                "the learning rate was searched",
                again=_replanner(run, replay),
            )
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
    from trainwright.tasks.train.record.events import recording

    result = run.find(Result)
    if result is None:
        events = Run(replay).read(Result).split_events if replay is not None else None

        def work(halt: threading.Event, claim: Claim) -> Result:
            request = _request(run).model_copy(update={"replay_events": events})
            return run_training(request, stop=halt, still_mine=claim, token=claim.token)

        with recording(run.work_folder()):  # between two launches, too: why there is another
            result = on_devices(run, work, "training ended", again=_replanner(run, replay))
        run.write(result)
    return {
        "artefact": Result.FILE,
        "state": result.state,
        "metrics": result.metrics,
        "devices": {device.id: device.batch_size for device in result.devices},
        "target_reached": result.target_reached,
        "duration_s": result.measured.duration_s,
    }


@step("store")
def store(run: Run) -> Reference:
    """Put the model into the run folder, what was measured into the calibration sets, and seal the run; read it back."""
    from trainwright.tasks.estimate import finished_runs
    from trainwright.tasks.store import save_model, seal, verify

    if not run.finished():
        save_model(run)
        finished_runs.append(run)  # before the seal: a run that is sealed has taught
        seal(run)
    manifest = verify(run)
    return {
        "artefact": manifest.FILE,
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files.values()),
        "verified": True,
    }


def analyze(run: Run) -> Reference:
    """Analyse this run beside all earlier ones, and write the report.

    Of a run that ended with success nothing else changes, and its job may train meanwhile: neither status nor hold is touched.
    """
    if run.finished() and run.status().state == "success":
        return {"run": run.uri, **_report(run)}
    return _analyze(run)


@step("analyze", last=True)
def _analyze(run: Run) -> Reference:
    return _report(run)


def _report(run: Run) -> Reference:
    from trainwright.tasks.analyze.history import analyze as report_on

    report = report_on(run, run.store_uri)
    return {
        "artefact": Report.FILE,
        "report": f"{run.uri}/{report.html}",
        "runs_compared": report.runs_compared,
    }


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
