"""The run or suite whose data is the reference for drift, and the comparison with it."""

from __future__ import annotations

import contextlib
import re
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
from trainwright.tasks.validate.kept_suite import suite_of_version, version_key

_MOST_RUNS = 20
"""How many of a job's newest runs are searched; those of earlier versions have no profile."""

_SUITE = re.compile(
    r"(?:(?P<store>.+://.+)/suites/)?(?P<job>[a-z0-9-]{1,63})/(?P<version>[0-9a-f]{64})(?:\.json)?"
)
"""A suite: JOB/VERSION, or the URI of its file."""


@dataclass(frozen=True)
class ReferenceProfile:
    """The profile of data that was checked earlier."""

    uri: str
    """of the run, or of the suite that was inferred from the data"""
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
    promoted = None
    with contextlib.suppress(CorruptArtefact, BadInput):  # `promote` reports a damaged alias
        alias_value, _ = find_alias(open_store(store_uri, settings), job.name, alias)
        promoted = None if alias_value is None else Run(alias_value.run, settings)
    if promoted is not None and (found := _unless_damaged(promoted)) is not None:
        return found
    for run in list_runs(store_uri, settings, job.name)[:_MOST_RUNS]:
        with contextlib.suppress(CorruptArtefact):  # without a status, an earlier run may serve
            if not run.finished() or run.status().state != "success":
                continue
            if (found := _unless_damaged(run)) is not None:
                return found
    return None


def named_reference(data: DataSpec, store_uri: str, settings: Settings) -> ReferenceProfile:
    """The run or suite that data.reference names. Raises BadInput, CorruptArtefact."""
    given = str(data.reference)
    if (suite := _SUITE.fullmatch(given)) is not None:
        return _of_suite(suite["store"] or store_uri, suite["job"], suite["version"], settings)
    uri = given if "://" in given else f"{open_store(store_uri, settings).uri}/runs/{given}"
    try:
        run = Run(uri, settings)
    except BadInput:
        raise BadInput(
            f"data.reference: got {given[:80]!r}; allowed: JOB/ID as `trainwright runs` lists "
            "them, a run's URI, or a suite as JOB/VERSION"
        ) from None
    found = _reference(run)
    if found is None:
        raise BadInput(
            f"data.reference: got {given}; allowed: a run whose data was validated by this "
            "version or a later one"
        )
    return found


def _of_suite(store_uri: str, job: str, version: str, settings: Settings) -> ReferenceProfile:
    root = open_store(store_uri, settings)
    uri = f"{root.uri}/{version_key(job, version)}"
    suite = suite_of_version(root, job, version)
    if suite is None or suite.profile is None:
        why = "there is no such suite" if suite is None else "it has no profile"
        raise BadInput(
            f"data.reference: got {uri}; {why}; allowed: a suite that a run inferred, as its "
            "validation.json names it (suite_version)"
        )
    return ReferenceProfile(uri, suite.profile)


def _reference(run: Run) -> ReferenceProfile | None:
    validation = run.find(Validation)
    if validation is None or validation.profile is None:
        return None
    return ReferenceProfile(run.uri, validation.profile)


def _unless_damaged(run: Run) -> ReferenceProfile | None:
    """The run's profile; a notice and None if it is damaged."""
    try:
        return _reference(run)
    except CorruptArtefact as error:
        progress.emit("notice", message=f"drift: the data is not compared with a run: {error}")
        return None


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
    drift = Drift(reference=reference.uri, rejected=rejected, columns=columns)
    for column in drift.drifted:
        progress.emit(
            "notice",
            message=f"drift: {drift_line(column)} (reference {reference.uri})",
            column=column.column,
            statistic=column.statistic,
            value=column.value,
            threshold=column.threshold,
        )
    success = validation.success and not rejected
    return validation.model_copy(update={"drift": drift, "success": success})
