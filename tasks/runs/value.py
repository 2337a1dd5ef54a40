"""The base of all parts of artefacts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """A part of an artefact."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")
