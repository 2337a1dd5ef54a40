"""The run whose data is the reference for drift, and the comparison with it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, CorruptArtefact
from trainwright.tasks.runs.alias import find_alias
from trainwright.tasks.runs.artefacts.data_profile import DataProfile, Drift
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run, list_runs
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.job import Job, Promotion
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.validate.drift.compare_profiles import compare, drift_line

_MOST_RUNS = 20
"""How many of a job's newest runs are searched; those of earlier versions have no profile."""


@dataclass(frozen=True)
class ReferenceProfile:
    """The profile of an earlier run's data."""

    run: str
    profile: DataProfile


def find_reference(job: Job, store_uri: str, settings: Settings) -> ReferenceProfile | None:
    """The job's data.reference, else its promoted run, else its last successful run.

    None if drift is off or there is no such run with a profile. Raises BadInput if data.reference
    can't be used.
    """
    if job.data.drift == "off":
        return None
    if job.data.reference is not None:
        return named_reference(job.data, store_uri, settings)
    alias = (job.promotion or Promotion()).alias
    with contextlib.suppress(CorruptArtefact, BadInput):  # `promote` reports a damaged alias
        promoted, _ = find_alias(open_store(store_uri, settings), job.name, alias)
        if promoted is not None and (found := _reference(Run(promoted.run, settings))) is not None:
            return found
    for run in list_runs(store_uri, settings, job.name)[:_MOST_RUNS]:
        with contextlib.suppress(CorruptArtefact):  # an earlier run may serve
            if run.finished() and run.status().state == "success":
                found = _reference(run)
                if found is not None:
                    return found
    return None


def named_reference(data: DataSpec, store_uri: str, settings: Settings) -> ReferenceProfile:
    """The run that data.reference names. Raises BadInput."""
    given = str(data.reference)
    uri = given if "://" in given else f"{open_store(store_uri, settings).uri}/runs/{given}"
    try:
        run = Run(uri, settings)
    except BadInput:
        raise BadInput(
            f"data.reference: got {given[:80]!r}; allowed: JOB/ID as `trainwright runs` lists "
            "them, or a run's URI"
        ) from None
    found = _reference(run)
    if found is None:
        raise BadInput(
            f"data.reference: got {given}; allowed: a run whose data was validated by this "
            "version or a later one"
        )
    return found


def _reference(run: Run) -> ReferenceProfile | None:
    validation = run.find(Validation)
    if validation is None or validation.profile is None:
        return None
    return ReferenceProfile(run.uri, validation.profile)


def with_drift(
    validation: Validation, data: DataSpec, reference: ReferenceProfile | None
) -> Validation:
    """The validation with its comparison; a notice for each drifted column.

    With data.drift `fail`, the validation fails if a column drifted.
    """
    if data.drift == "off" or validation.profile is None:
        return validation
    if reference is None:
        return validation.model_copy(update={"drift": Drift(reference=None)})
    columns = compare(validation.profile, reference.profile)
    rejected = data.drift == "fail" and any(column.drifted for column in columns)
    drift = Drift(reference=reference.run, rejected=rejected, columns=columns)
    for column in drift.drifted:
        progress.emit(
            "notice",
            message=f"drift: {drift_line(column)} (reference {reference.run})",
            column=column.column,
            statistic=column.statistic,
            value=column.value,
            threshold=column.threshold,
        )
    success = validation.success and not rejected
    return validation.model_copy(update={"drift": drift, "success": success})
