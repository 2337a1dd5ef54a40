"""The run folder: `<store>/runs/<job name>/<run id>/`, the only source of truth about a run.

Every step reads its inputs there and adds one artefact. A run without manifest.json is not
finished; running the job again continues it.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from trainwright.estimator.near_names import meant
from trainwright.estimator.structure import Structure
from trainwright.infra.private_files import new_private_folders, private_folder
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, CorruptArtefact, DataRejected
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.run_status import Manifest, Status
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.model import ModelSource, find_model, write_model
from trainwright.tasks.runs.sealed_objects import SealedObjects
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.documents import one_line, validated
from trainwright.tasks.spec.job import Job, JobName
from trainwright.tasks.spec.recipe import with_recipe
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.storage.objects import ObjectStore

_URI = re.compile(
    r"^(?P<store>(s3|file)://.+)/runs/(?P<job>[a-z0-9-]{1,63})/(?P<id>[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6})/?$"
)


_START_NEW = "; if the run is unfinished, --new starts a new run"
_RESTORE = "; restore the file from a copy, or train again with `trainwright run JOB --new`"
MOST_CHANGES = 3
"""How many differences between two jobs a message lists."""


class _File(Protocol):
    FILE: str


AnyArtefact = TypeVar("AnyArtefact", bound=BaseModel)


class Run:
    """A run folder. `objects` is rooted at it: the key `plan.json` is the run's plan.

    What a manifest seals is checked whenever it is read, and raises CorruptArtefact if changed.
    """

    def __init__(self, uri: str, settings: Settings) -> None:
        match = _URI.match(uri)
        if match is None:
            raise BadInput(
                f"run: got {uri!r}; "
                "allowed: <store>/runs/<job name>/<run id>, as `trainwright runs` lists them"
            )
        self.uri = uri.rstrip("/")
        self.store_uri, self.job_name, self.id = match["store"], match["job"], match["id"]
        self.settings = settings
        self.objects = SealedObjects(open_store(self.uri, settings))

    def __repr__(self) -> str:
        return f"Run({self.uri!r})"

    def read(self, kind: type[AnyArtefact]) -> AnyArtefact:
        """An artefact. Raises FileNotFoundError if it is missing, CorruptArtefact if invalid."""
        file = _file(kind)
        content = self.objects.get(file)
        try:
            return kind.model_validate_json(content, extra="ignore")  # a later version's fields
        except ValidationError as error:
            sealed = kind is Manifest  # only a finished run has one
            way_out = _RESTORE if sealed else _START_NEW
            raise CorruptArtefact(f"{self.uri}/{file}: {one_line(error)}{way_out}") from error

    def find(self, kind: type[AnyArtefact]) -> AnyArtefact | None:
        """An artefact; None if it does not exist yet."""
        try:
            return self.read(kind)
        except FileNotFoundError:
            return None

    def has(self, kind: type[BaseModel]) -> bool:
        """Whether an artefact exists."""
        return any(item.key == _file(kind) for item in self.objects.list(_file(kind)))

    def write(self, artefact: BaseModel) -> None:
        """Add an artefact, or replace it if the step is done again."""
        self.objects.put(_file(type(artefact)), artefact.model_dump_json(indent=1).encode())

    def exists(self) -> bool:
        """Whether the run was created."""
        return self.has(RunJob)

    def finished(self) -> bool:
        """Whether the run is sealed."""
        return self.objects.sealed()

    def job(self) -> Job:
        """The run's job; with a recommended model, its recipe fills what the user did not set."""
        stored = self.read(RunJob)
        return job_of(stored, self.find(Recommendation) if stored.model is None else None)

    def root(self) -> ObjectStore:
        """The whole store."""
        return open_store(self.store_uri, self.settings)

    @property
    def hold(self) -> str:
        """The ledger's name of the right to work on this job's runs; one process holds it."""
        return f"{self.store_uri}/runs/{self.job_name}"

    @property
    def work_path(self) -> Path:
        """The run's work folder on this machine; it may not exist."""
        return self.settings.home / "work" / self.job_name / self.id

    def work_folder(self) -> Path:
        """The run's work folder, created if needed. Steps must survive the loss of its content."""
        private_folder(self.settings.home)
        return new_private_folders(self.work_path)

    def model(self) -> ModelSource:
        """The run's model. Raises BadInput if there is none yet, CorruptArtefact if changed."""
        found = self.find_model()
        if found is None:
            raise BadInput(
                "model: the run has none yet; name one in the job, or run `recommend` first"
            )
        return found

    def find_model(self) -> ModelSource | None:
        """The run's model; None if it has none yet. Raises CorruptArtefact if it was changed."""
        job = self.find(RunJob)
        return find_model(self.objects, job.model.config if job and job.model else {})

    def write_model(self, model: ModelSource) -> None:
        """Add the model that a step of this run chose."""
        write_model(self.objects, model)

    def source_folder(self) -> Path:
        """A local copy of the model's files. Raises as `model` does."""
        return self.model().unpack(self.work_folder() / "source")

    def data(self) -> DataSchema:
        """The schema of the run's data. Raises DataRejected if no validation has passed."""
        validation = self.find(Validation)
        if validation is None or not validation.success or validation.data is None:
            raise DataRejected(
                f"{self.uri}: the data has not passed validation; run `validate` first"
            )
        return validation.data

    def status(self) -> Status:
        """The run's status."""
        try:
            return self.read(Status)
        except FileNotFoundError:
            raise CorruptArtefact(f"{self.uri}/{Status.FILE}: missing{_START_NEW}") from None

    def note(self, **changes: Any) -> Status:
        """Change fields of the status: state, step, error, steps, holder."""
        status = self.status().model_copy(update={"updated_at": now(), **changes})
        self.write(status)
        return status


def job_of(stored: RunJob, recommendation: Recommendation | None) -> Job:
    """The job as it is done: with the recipe of its recommended model, if it names none."""
    if stored.model is not None or recommendation is None:
        return stored
    return with_recipe(stored, recommendation.recipe, stored.given)


def _file(kind: type[BaseModel]) -> str:
    return str(getattr(kind, "FILE", Structure.FILE if kind is Structure else ""))


def now() -> str:
    """The current time as artefacts write it: UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def list_runs(store_uri: str, settings: Settings, job_name: str | None = None) -> list[Run]:
    """The runs of a store, or of one job in it, newest first."""
    store = open_store(store_uri, settings)
    jobs = [job_name] if job_name is not None else list(store.folders("runs/"))
    found = []
    for job in jobs:
        for identifier in store.folders(f"runs/{job}/"):
            if _URI.match(uri := f"{store.uri}/runs/{job}/{identifier}"):
                found.append(Run(uri, settings))
    return sorted(found, key=lambda run: run.id, reverse=True)


def newest_finished(settings: Settings, job_name: str | None = None) -> list[Run]:
    """The newest sealed run of every job of the store, or of one, which must have one.

    Raises BadInput.
    """
    if job_name is not None:
        validated(JobName, {"name": job_name}, "job")
    found: dict[str, Run] = {}
    for run in list_runs(settings.store, settings, job_name):
        if run.job_name not in found and run.finished():
            found[run.job_name] = run
    if job_name is not None and not found:
        known = sorted({run.job_name for run in newest_finished(settings)})
        raise BadInput(
            f"job: got {job_name!r}, of which {settings.store} has no finished run; "
            f"allowed: {', '.join(known) or 'a job that has been trained'}"
        )
    return list(found.values())


def open_run(
    job: Job,
    settings: Settings,
    holder: Holder,
    store_uri: str,
    *,
    new: bool = False,
    worker: str | None = None,
    lacking: type[BaseModel] | None = None,
) -> Run:
    """The newest unfinished run with an identical job and source, or a new run.

    A new run if `new` is set; if `worker` is given and another holder last worked on the
    unfinished run; or if `lacking` is given and the unfinished run already has this artefact.

    Takes the hold on the job first, so that only one of two callers gets it. Raises RunHeld with
    the holder's name.
    """
    ledger = Ledger(settings.ledger_url)
    store = open_store(store_uri, settings)
    fresh = Run(f"{store.uri}/runs/{job.name}/{_new_id()}", settings)
    ledger.take([fresh.hold], holder, fresh.uri)
    try:
        model = ModelSource.given(job.model) if job.model else None
        run = (
            fresh if new else _unfinished(job, settings, store.uri, model, worker, lacking) or fresh
        )
        if run is not fresh:
            ledger.release(fresh.uri, [fresh.hold])
            ledger.take([run.hold], holder, run.uri)  # RunHeld if another process was faster
            try:
                run.note(state="running", holder=holder.name, error=None)
            except BaseException:
                ledger.release(run.uri, [run.hold], holder=holder.name)
                raise
            return run
        if model is not None:
            run.write_model(model)
        moment = now()
        run.write(Status(state="running", holder=holder.name, started_at=moment, updated_at=moment))
        run.write(RunJob.of(job))
        return run
    except BaseException:
        ledger.release(fresh.uri)
        raise


def _new_id() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def _unfinished(
    job: Job,
    settings: Settings,
    store_uri: str,
    model: ModelSource | None,
    worker: str | None,
    lacking: type[BaseModel] | None,
) -> Run | None:
    other: str | None = None
    for run in list_runs(store_uri, settings, job.name):
        stored = run.find(RunJob)
        if stored is None:
            continue  # killed while it was created
        if run.finished() and run.status().state == "success":
            # Only runs after the newest successful one count. (A sealed run may still lack its
            # report.)
            break
        if worker not in (None, run.status().holder):
            continue
        changed = _changed_fields(
            stored.model_dump(exclude={"schema_version", "given"}), job.model_dump()
        )
        if job.model is None:  # then the other fields are the recommended model's
            changed = changed or sorted({*stored.given} ^ {*RunJob.of(job).given})
        changed = changed or _changed_files(_given_files(run.find_model()), _given_files(model))
        if not changed:
            return None if lacking is not None and run.has(lacking) else run
        shown = ", ".join(changed[:MOST_CHANGES]) + (
            f" and {more} more" if (more := len(changed) - MOST_CHANGES) > 0 else ""
        )
        other = other or f"starting a new run: the unfinished run {run.uri} has a different {shown}"
    if other is not None:
        progress.emit("notice", message=other)
    return None


def _changed_fields(before: Any, now: Any, name: str = "") -> list[str]:
    """The names of the fields that differ between two documents."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [name]
    lacks = object()
    changed = [
        _changed_fields(before.get(key, lacks), now.get(key, lacks), f"{name}.{key}".strip("."))
        for key in {**before, **now}
    ]
    return [field for fields in changed for field in fields]


def _given_files(model: ModelSource | None) -> Mapping[str, bytes]:
    """The files that the user gave; a recommended model belongs to the run."""
    return model.files if model is not None and model.origin == "given" else {}


def _changed_files(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[str]:
    """The model's files that changed, were added or were removed."""
    return sorted(
        f"source/{name}" for name in {**before, **now} if before.get(name) != now.get(name)
    )


def replayed(run_uri: str, job: Job, settings: Settings) -> str:
    """The URI of a run to replay. Raises BadInput unless it is a finished training of this job."""
    earlier = Run(run_uri, settings)
    if not earlier.exists() or earlier.find(Result) is None:
        raise BadInput(f"--replay: got {run_uri}; allowed: a run whose training has finished")
    if earlier.job_name != job.name:
        raise BadInput(f"--replay: got a run of job {earlier.job_name}; allowed: one of {job.name}")
    return earlier.uri


def resolve(given: str, settings: Settings, store: str | None = None) -> Run:
    """The run with a URI, or with an id as `trainwright runs` prints it. Raises BadInput."""
    if "://" in given:
        run = Run(given, settings)
        if not run.exists():
            raise BadInput(f"run: got {given}; there is no such run")
        return run
    runs = {run.id: run for run in list_runs(store or settings.store, settings)}
    if given in runs:
        return runs[given]
    of_job = [name for name, run in runs.items() if run.job_name == given]
    if not of_job and os.path.isfile(given):
        raise BadInput(
            f"run: got {given}, a file; allowed: a run's URI or id; `trainwright runs` lists runs, "
            f"`trainwright run {given}` makes one if it is a job file"
        )
    near = f"; did you mean {max(of_job)}?" if of_job else meant(given, runs)
    raise BadInput(
        f"run: got {given[:80]!r}; allowed: a run's URI, or an id that `trainwright runs` "
        f"lists{near}"
    )
