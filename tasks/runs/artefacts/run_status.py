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
    state: RunState
    step: str | None = Field(
        default=None, description="the running step, or the one in which the run ended"
    )
    holder: str
    started_at: str
    updated_at: str
    steps: dict[str, float] = Field(default_factory=dict, description="seconds by finished step")
    error: dict[str, Any] | None = None


class SealedFile(Value):
    """A file of a manifest."""

    size: int
    sha256: str


class Manifest(Artefact):
    """manifest.json: seals the run; written once, last."""

    FILE: ClassVar[str] = "manifest.json"
    run: str
    sealed_at: str
    files: dict[str, SealedFile]
