"""The base of the estimator's documents: immutable, finite numbers, unknown fields ignored."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A document or a part of one."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
