"""Estimates, plans and data schemas, as the command line prints them. Runs in a compute process.

They are arithmetic on the client's values: impossible numbers are the client's error, not ours.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from trainwright.estimator.predict.calibration import Calibration, parse
from trainwright.estimator.structure import Structure
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.preview import plan_structure
from trainwright.tasks.errors import BadInput, Forbidden, TrainwrightError
from trainwright.tasks.estimate.step import estimate_step
from trainwright.tasks.extract import batch_spec
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job, require_metrics
from trainwright.tasks.spec.pool import Device, Pool, load_pool
from trainwright.tasks.spec.recipe import with_recipe

if TYPE_CHECKING:
    from trainwright.tasks.data.dataset import Dataset


def answer(request: dict[str, Any]) -> str:
    """The answer to a request as JSON, or `{"error": …}` as the command line prints it."""
    try:
        document = _CALLS[request["call"]](request)
        return json.dumps(document, allow_nan=False)
    except TrainwrightError as error:
        return error_document(error)
    except MemoryError:
        return error_document(BadInput("request: takes more memory than allowed"))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return error_document(
            BadInput(
                "request: can't compute a result from these numbers "
                f"({type(error).__name__}: {error})"
            )
        )


def error_document(error: TrainwrightError) -> str:
    """The error in the format of `--json`."""
    document: dict[str, Any] = {"error": error.document()}
    if error.kind == "infeasible":
        document["feasible"] = False
    return json.dumps(document, default=str)


def _estimate(request: dict[str, Any]) -> dict[str, Any]:
    return estimate_step(
        Structure.model_validate(request["structure"]),
        Settings.from_environment(),
        batch_size=request["batch_size"],
        device_type=request["device_type"],
        calibration=_calibration(request["calibration"]) if request["calibration"] else None,
    )


def _calibration(values: dict[str, Any]) -> Calibration:
    return parse(json.dumps(values).encode(), "of the request", importlib.metadata.version("torch"))


def _plan(request: dict[str, Any]) -> dict[str, Any]:
    job = Job.model_validate(request["job"])
    pool = Pool.model_validate(request["pool"]) if request["pool"] else load_pool(None)
    calibrations = [_calibration(one) for one in request["calibrations"]]
    devices = usable(pool, job)
    known = Estimate.model_validate(request["estimate"]) if request["estimate"] else None
    if calibrations or any(known is None or known.find(device) is None for device in devices):
        known = None  # of a run whose pool had other devices
    if known is None and not request["may_measure"]:
        calibrations += _known(devices, calibrations)
    schema = DataSchema.model_validate(request["schema"])
    # From `rows` alone, the kind of task is not known.
    task = schema.task if schema.task != "custom" else job.data.task
    require_metrics(job, "request", task, len(schema.classes or ()) or None)
    structure = Structure.model_validate(request["structure"])
    if known is not None:
        return make_plan(job, pool, known, schema, now=datetime.now(UTC)).model_dump(mode="json")
    return plan_structure(
        job, pool, schema, structure, Settings.from_environment(), calibrations
    ).model_dump(mode="json")


def _known(devices: list[Device], calibrations: list[Calibration]) -> list[Calibration]:
    """What this machine knows besides the given calibrations.

    Raises Forbidden if the machine must be measured first, which uses its devices.
    """
    from trainwright.tasks.estimate.calibrate import known_calibration
    from trainwright.tasks.estimate.link import link_file

    settings = Settings.from_environment()
    given = {one.threads for one in calibrations if one.device_type == "cpu"}
    needed = {one.threads for one in devices if one.type == "cpu"} - given
    known = {threads: known_calibration(threads, settings) for threads in needed | ({1} - given)}
    for threads in needed:
        if known[threads] is None:
            raise Forbidden(
                f"calibrations: none for a CPU of {threads} thread(s); give one, since "
                "measuring it needs the right to start runs"
            )
    if sum(one.local for one in devices) > 1 and not link_file(settings).exists():
        raise Forbidden(
            "pool: the link between this machine's devices is not measured yet; measuring it needs "
            "the right to start runs"
        )
    return [one for one in known.values() if one is not None] if needed else []


def _offers(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The models that a job's data can have, each with the request for its structure."""
    from trainwright.tasks.recommend.recommender import offers

    found = []
    with _job_with_data(request) as (job, pool, data):
        spec = batch_spec(data.schema).model_dump(mode="json")
        for one in offers(job, data, pool):
            train, model = with_recipe(job, one.recipe, request["given"]).train, one.model()
            files = {name: content.decode() for name, content in model.files.items()}
            traced = {
                "model": {"source": model.entry, "files": files},
                "optimizer": train.optimizer.model_dump(mode="json"),
                "precision": train.precision,
                "label_smoothing": train.label_smoothing,
                "spec": spec,
            }
            found.append({"name": one.name, "request": traced})
    return found


def _recommend(request: dict[str, Any]) -> dict[str, Any]:
    from trainwright.tasks.recommend.recommender import advise, offers, untrained

    structures = {
        name: Structure.model_validate(one) for name, one in request["structures"].items()
    }
    calibrations = [_calibration(one) for one in request["calibrations"]]
    settings = Settings.from_environment()
    with _job_with_data(request) as (job, pool, data):
        offered = offers(job, data, pool)
        return advise(
            untrained(job),
            request["given"],
            job.data,
            data,
            offered,
            pool,
            structures,
            settings,
            calibrations,
        ).document(job.name)


@contextlib.contextmanager
def _job_with_data(request: dict[str, Any]) -> Iterator[tuple[Job, Pool, Dataset]]:
    """The job, with data on this machine, which does not stay prepared if the job is refused."""
    from trainwright.tasks.data.prepared import prepared_if_used
    from trainwright.tasks.data.sources import localized

    settings = Settings.from_environment()
    job = Job.model_validate(request["job"])
    pool = Pool.model_validate(request["pool"]) if request["pool"] else load_pool(None)
    local = job.model_copy(update={"data": localized(job.data, settings)})
    with prepared_if_used(local.data, settings.home, local.train.seed) as data:
        yield local, pool, data


def _schema(request: dict[str, Any]) -> dict[str, Any]:
    from trainwright.tasks.data import dataset
    from trainwright.tasks.data.sources import localized

    data = localized(DataSpec.model_validate(request["data"]), Settings.from_environment())
    return dataset.describe(data).model_dump(mode="json")


def _warm_up(_: dict[str, Any]) -> dict[str, Any]:
    """Import what the other calls need."""
    from trainwright.estimator.curves import line_through
    from trainwright.tasks.data import dataset

    line_through([1, 2], [1.0, 2.0])
    dataset.describe(DataSpec(uri="builtin:digits"))
    return {}


_CALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "estimate": _estimate,
    "plan": _plan,
    "schema": _schema,
    "offers": _offers,
    "recommend": _recommend,
    "warm_up": _warm_up,
}
