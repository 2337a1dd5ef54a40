"""How far a run is: status.json while it runs, manifest.json when it is finished."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.runs.value import Value

RunState = Literal["running", "success", "failed", "infeasible", "interrupted"]


class Status(Artefact):
    """status.json: the run's progress. It changes after sealing, so the manifest omits it."""

    FILE: ClassVar[str] = "status.json"
    state: RunState = Field(description="what users see; `trainwright runs` lists it")
    step: str | None = Field(
        default=None, description="the running step, or the one in which the run ended"
    )
    holder: str = Field(description="the process that has the run, or had it last")
    started_at: str = Field(description="UTC")
    updated_at: str = Field(description="UTC")
    steps: dict[str, float] = Field(default_factory=dict, description="seconds by finished step")
    error: dict[str, Any] | None = Field(
        default=None, description="why it failed: kind, message and details"
    )


class SealedFile(Value):
    """A file of a manifest."""

    size: int = Field(description="bytes")
    sha256: str = Field(description="of the content")


class Manifest(Artefact):
    """manifest.json: seals the run; written once, last."""

    FILE: ClassVar[str] = "manifest.json"
    run: str = Field(description="URI of the run")
    sealed_at: str = Field(description="UTC")
    files: dict[str, SealedFile]
