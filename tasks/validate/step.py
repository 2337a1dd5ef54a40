"""Step `validate`: checks the run's data and stores the result."""

from __future__ import annotations

from typing import Any

from trainwright.tasks import progress
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.errors import BadInput, DataRejected, ServiceUnreachable
from trainwright.tasks.runs.artefacts.data_profile import Drift
from trainwright.tasks.runs.artefacts.data_schema import DataSchema, Vocabulary
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.validation import REJECTION, Validation
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.job import Job, require_metrics
from trainwright.tasks.storage.connect import open_store

_NAMED = 20


def work(context: RunContext) -> Reference:
    """Check the run's data. Raises DataRejected, after storing the result, if it fails."""
    from trainwright.tasks.data.dataset import say_changes
    from trainwright.tasks.data.model_schema import schema_in_sandbox
    from trainwright.tasks.data.sources import content_sha256, localized
    from trainwright.tasks.validate.check import failure_line, validate
    from trainwright.tasks.validate.drift.reference_profile import find_reference, with_drift
    from trainwright.tasks.validate.kept_suite import keep_suite, kept_suite, with_version
    from trainwright.tasks.validate.rejection_page import rejection_page

    run, job = context.run, context.run.job()
    data = localized(job.data, context.settings)
    earlier = run.find(Validation)
    root = run.root()
    if earlier is not None and earlier.success and earlier.data is not None:
        if content_sha256(data) == earlier.data.sha256:
            _require_metrics(job, earlier)
            return _reference(earlier)
        if run.find(Plan) is not None:
            raise BadInput(
                f"{job.data.uri}: the data has changed since {run.uri} started; "
                "--new starts a new run with it"
            )
    if data.reader == "model":
        model, limits = run.model(), context.settings.extract_limits()
        source = run.source_folder()
        schema = schema_in_sandbox(source, model.entry, model.config, data, limits)
        validation = _unchecked(schema, data)
    else:
        reference = find_reference(job, run.store_uri, context.settings)
        kept = kept_suite(root, job)
        found = validate(
            data,
            seed=job.train.seed,
            kept_suite=None if kept is None else kept.expectations,
            timeout_s=context.settings.validate_timeout_s,
        )
        validation = with_drift(with_version(found, kept), job.data, reference)
        if validation.drift is not None and validation.drift.reference is None:
            message = "drift: there is no earlier stored run to compare the data with"
            progress.emit("notice", message=message)
    prepares = validation.success and data.reader != "model"
    if prepares and (names := _prepare(data, job, context.settings)):
        run.write(Vocabulary(names=names))
    run.write(validation)
    _announce(validation)
    if not validation.success:
        page = rejection_page(job.name, run.uri, validation)
        run.objects.put(REJECTION, page.encode())
        raise DataRejected(
            failure_line(validation),
            artefact=f"{run.uri}/{Validation.FILE}",
            page=f"{run.uri}/{REJECTION}",
        )
    run.objects.delete(REJECTION)  # of data that has been mended since
    _require_metrics(job, validation)
    if validation.data is not None:
        say_changes(validation.data)
    if validation.suite_source == "inferred":
        keep_suite(root, job, run.uri, validation)
    return _reference(validation)


def _prepare(data: DataSpec, job: Job, settings: Settings) -> dict[str, list[str]]:
    """Prepare valid data, so that ranks on this machine find it and a full disk takes no device.

    Returns the values of category columns by code, and the classes; empty without categories.
    """
    from trainwright.tasks.data.prepared import prepared

    found = prepared(data, settings.home, job.train.seed)
    return found.names() if found.vocabularies else {}


def _announce(validation: Validation) -> None:
    """A notice for each warning."""
    for one in validation.warnings:
        column = f"column {one.column!r}: " if one.column is not None else ""
        more = " …" if one.count is None or one.count > len(one.rows) else ""
        listed = ", ".join(map(str, one.rows)) + more
        rows = f" ({'row' if listed == str(one.rows[0]) else 'rows'} {listed})" if one.rows else ""
        progress.emit(
            "notice",
            message=f"{one.kind.replace('_', ' ')}: {column}{one.message}{rows}",
            **one.model_dump(mode="json", exclude={"message"}),
        )


def _unchecked(schema: DataSchema, data: DataSpec) -> Validation:
    """The validation of data that the model's source reads: only its schema is known."""
    progress.emit("notice", message=f"{data.uri}: read by the model's source; it is not checked")
    return Validation(
        success=True,
        suite_source="none",
        suite=[],
        expectations=[],
        data=schema,
        checked_rows=0,
        great_expectations={},
    )


def _require_metrics(job: Job, validation: Validation) -> None:
    """Raise BadInput if the job names a metric that the task of its data lacks."""
    if (schema := validation.data) is not None:
        require_metrics(job, "job", schema.task, len(schema.classes or ()) or None)


def _reference(validation: Validation) -> Reference:
    return {
        "artefact": Validation.FILE,
        "success": validation.success,
        "expectations": len(validation.expectations),
        "rows": validation.data.rows if validation.data else 0,
        "suite": validation.suite_source,
        "drift": _drift(validation.drift),
    }


def _drift(drift: Drift | None) -> dict[str, Any] | str:
    """The comparison in short, or why there is none."""
    if drift is None:
        return "off"
    if drift.reference is None:
        return "no earlier run to compare with"
    return {
        "reference": drift.reference,
        "drifted": [column.column for column in drift.drifted][:_NAMED],
        "columns_drifted": len(drift.drifted),
    }


def summary(reference: Reference) -> str:
    """One line, as in `1,797 rows meet 196 expectations (inferred)`."""
    if reference.get("suite") == "none":
        return f"{reference['rows']} rows, read by the model's source; they are not checked"
    drift = reference.get("drift")
    count = drift["columns_drifted"] if isinstance(drift, dict) else 0
    drifted = f"; {count} column{'s' if count > 1 else ''} drifted" if count else ""
    return (
        f"{reference['rows']:,} rows meet {reference['expectations']} expectations "
        f"({reference['suite']}){drifted}"
    )


def validate_job(job: Job, settings: Settings, *, forget_kept_suite: bool = False) -> Validation:
    """Check a job's data without a run, by the suite of its earlier runs if the store has one.

    With `forget_kept_suite` that suite is removed first.
    """
    from trainwright.tasks.data.dataset import say_changes
    from trainwright.tasks.data.model_schema import schema_of_model
    from trainwright.tasks.data.sources import localized
    from trainwright.tasks.validate.check import validate
    from trainwright.tasks.validate.drift.reference_profile import find_reference, with_drift
    from trainwright.tasks.validate.kept_suite import forget_suite, kept_suite, with_version

    data = localized(job.data, settings)
    if forget_kept_suite:
        forget_suite(open_store(settings.store, settings), job)
    if data.reader == "model":
        if job.model is None:
            raise BadInput("model: required field is missing; data.reader: model needs it")
        found = _unchecked(schema_of_model(job.model, data, settings), data)
        _require_metrics(job, found)
        return found
    kept, reference = None, None
    try:
        kept = kept_suite(open_store(settings.store, settings), job)
        reference = find_reference(job, settings.store, settings)
    except ServiceUnreachable as error:
        progress.emit("notice", message=f"no comparison with earlier runs: {error}")
    found = validate(
        data,
        seed=job.train.seed,
        kept_suite=None if kept is None else kept.expectations,
        timeout_s=settings.validate_timeout_s,
    )
    found = with_version(found, kept)
    _announce(found)
    _require_metrics(job, found)
    if found.data is not None:
        say_changes(found.data)
    return with_drift(found, job.data, reference)


def validate_data(data: dict[str, Any], settings: Settings) -> Reference:
    """Check data described as in a job file. Returns a summary; raises DataRejected if it fails.

    Drift is checked if the data names its reference. No model is named, so missing values are kept
    unless `missing` is `refuse`.
    """
    from trainwright.tasks.data.sources import localized
    from trainwright.tasks.validate.check import failure_line, validate
    from trainwright.tasks.validate.drift.reference_profile import named_reference, with_drift

    given = validated(DataSpec, data, "data")
    if given.missing == "auto":
        given = given.model_copy(update={"missing": "keep"})
    spec = localized(given, settings)
    compared = spec.reference is not None and spec.drift != "off"
    reference = named_reference(spec, settings.store, settings) if compared else None
    checked = validate(spec, timeout_s=settings.validate_timeout_s)
    validation = with_drift(checked, spec, reference)
    _announce(validation)
    if not validation.success:
        raise DataRejected(failure_line(validation))
    return {
        "success": True,
        "expectations": len(validation.expectations),
        "rows": validation.checked_rows,
        "drift": _drift(validation.drift),
    }
