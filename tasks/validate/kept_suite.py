"""The suites that were inferred for a job, kept in the store.

    <store>/suites/<job>.json              the suite in force: a list of expectations
    <store>/suites/<job>/<version>.json    each inferred one, with the profile that it is made of

A version is the SHA-256 of the expectations, so equal suites are one version. Later runs are
checked by the suite in force. A user may edit it: it is never written again unless it is deleted.
Then the next run infers one, and earlier versions stay.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, ValidationError

from trainwright.tasks.errors import BadInput, CorruptArtefact
from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.runs.artefacts.data_profile import DataProfile
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.spec.documents import one_line
from trainwright.tasks.spec.job import Job
from trainwright.tasks.storage.objects import ObjectStore, sha256
from trainwright.tasks.validate.check import expectations_in


class KeptSuite(Artefact):
    """A version of a job's suite. Its file may be copied to be in force again."""

    FILE = ""  # the key depends on job and version
    expectations: list[dict[str, Any]] = Field(description="each as Great Expectations writes it")
    run: str | None = Field(
        default=None, description="URI of the run from whose data it was inferred; None: not known"
    )
    profile_sha256: str | None = Field(
        default=None, description="of the profile that it was inferred from; None: not known"
    )
    profile: DataProfile | None = Field(
        default=None, description="the profile that it was inferred from; None: not known"
    )


def suite_version(expectations: list[dict[str, Any]]) -> str:
    """The SHA-256 of a suite's expectations, whatever the order of their keys."""
    return sha256(json.dumps(expectations, sort_keys=True).encode())


def kept_suite(root: ObjectStore, job: Job) -> KeptSuite | None:
    """The suite in force; None if there is none or the job names its own. Raises CorruptArtefact.

    Its profile is known if it is as inferred.
    """
    if job.data.expectations:
        return None
    key = _key(job)
    try:
        content = json.loads(root.get(key))
        expectations = expectations_in(content, f"{root.uri}/{key}")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, BadInput) as error:
        why = str(error) if isinstance(error, BadInput) else f"{root.uri}/{key}: not JSON"
        raise CorruptArtefact(f"{why}; delete it, and the next run infers it again") from None
    inferred = suite_of_version(root, job.name, suite_version(expectations))
    return inferred or KeptSuite(expectations=expectations)


def with_version(validation: Validation, kept: KeptSuite | None) -> Validation:
    """The validation with the version of its suite and the profile that this was inferred from."""
    if validation.suite_source == "inferred":
        profile = _profile_sha256(validation)
    else:
        profile = kept.profile_sha256 if kept is not None else None
    version = suite_version(validation.suite)
    return validation.model_copy(update={"suite_version": version, "suite_profile": profile})


def keep_suite(root: ObjectStore, job: Job, run: str, validation: Validation) -> None:
    """Keep an inferred suite: as a version, and in force unless another one is."""
    kept = KeptSuite(
        expectations=validation.suite,
        run=run,
        profile_sha256=_profile_sha256(validation),
        profile=validation.profile,
    )
    version = suite_version(validation.suite)
    root.create(version_key(job.name, version), kept.model_dump_json(indent=1).encode())
    root.create(_key(job), json.dumps(validation.suite, indent=1).encode())


def forget_suite(root: ObjectStore, job: Job) -> None:
    """Remove the suite in force, if there is one; its versions stay. The next run infers one."""
    root.delete(_key(job))


def suite_of_version(root: ObjectStore, job: str, version: str) -> KeptSuite | None:
    """A version of a job's inferred suites; None if there is none. Raises CorruptArtefact."""
    key = version_key(job, version)
    try:
        return KeptSuite.model_validate_json(root.get(key))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise CorruptArtefact(f"{root.uri}/{key}: {one_line(error)}; delete it") from error


def _profile_sha256(validation: Validation) -> str | None:
    profile = validation.profile
    return None if profile is None else sha256(profile.model_dump_json().encode())


def _key(job: Job) -> str:
    return f"suites/{job.name}.json"


def version_key(job: str, version: str) -> str:
    """The key of a version in the store; `job` is a job's name."""
    return f"suites/{job}/{version}.json"
