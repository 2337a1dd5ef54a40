"""The part `export` of a job: in which forms its finished model is written."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from trainwright.tasks.spec.documents import Document

ExportKind = Literal["onnx", "onnx-int8", "rtl"]
"""Every kind of which there are reports."""


class ExportSpec(Document):
    """The exports of a finished run: a list of kinds, or a mapping with these fields."""

    to: list[ExportKind] = Field(
        default_factory=list, description="kinds of export, made after the run is stored"
    )
    tolerance: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="how much worse an inexact export may be: in points of a share such as "
        "accuracy (0.005: half a point), or relative, of an error; default: by kind",
    )
    fine_tune: bool = Field(
        default=False,
        description="onnx-int8: train the model again for a short time with rounded numbers if "
        "its metric falls by more than the tolerance",
    )

    @model_validator(mode="before")
    @classmethod
    def _list_of_kinds(cls, value: Any) -> Any:
        return {"to": value} if isinstance(value, list) else value

    @model_validator(mode="after")
    def _tunes_integers(self) -> ExportSpec:
        if self.fine_tune and "onnx-int8" not in self.to:
            raise ValueError(
                f"fine_tune is for onnx-int8, got to: [{', '.join(self.to)}]; rtl always trains "
                "again, onnx never"
            )
        return self
