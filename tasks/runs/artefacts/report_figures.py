"""report/report.json: the numbers of the report."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from trainwright.tasks.runs.artefacts.artefact import Artefact


class Report(Artefact):
    """report/report.json: the numbers behind report/report.html."""

    FILE: ClassVar[str] = "report/report.json"
    html: str = "report/report.html"
    run: str
    runs_compared: int
    engine: str = Field(
        description="the engine that computed the numbers: dask, or pandas if asked for"
    )
    epochs: list[dict[str, float | None]] = Field(description="loss and metrics by epoch")
    predicted_and_measured: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    history: list[dict[str, Any]] = Field(
        description="this run, then its job's earlier runs, then other jobs'; newest first"
    )
