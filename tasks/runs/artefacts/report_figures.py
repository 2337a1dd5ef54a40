"""report/report.json: the numbers of the report."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from trainwright.tasks.runs.artefacts.artefact import Artefact


class Report(Artefact):
    """report/report.json: the numbers behind report/report.html."""

    FILE: ClassVar[str] = "report/report.json"
    html: str = Field(default="report/report.html", description="file of the report")
    run: str = Field(description="URI of the run")
    runs_compared: int = Field(description="URIs of the earlier runs")
    engine: str = Field(
        description="the engine that computed the numbers: dask, or pandas if asked for"
    )
    epochs: list[dict[str, float | None]] = Field(description="loss and metrics by epoch")
    predicted_and_measured: list[dict[str, Any]] = Field(description="by quantity")
    devices: list[dict[str, Any]] = Field(description="figures by device")
    history: list[dict[str, Any]] = Field(
        description="this run, then its job's earlier runs, then other jobs'; newest first"
    )
