"""job.json: the job of a run, as the run began."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ConfigDict, Field

from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.recipe import given_fields


class RunJob(Job):
    """job.json: the run's job, with absolute paths."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    FILE: ClassVar[str] = "job.json"
    schema_version: int = 1
    given: list[str] = Field(
        default_factory=list,
        description="names of the fields of `train` that the user set; the recipe of a recommended "
        "model fills in others",
    )

    @classmethod
    def of(cls, job: Job) -> RunJob:
        """A job as its runs store it."""
        given = [name for name in given_fields(job) if name.startswith("train.")]
        return cls.model_validate(job.model_dump(mode="json") | {"given": given})
