"""What the estimator's documents are made of: values of finite numbers that do not change; unknown fields are ignored."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Part of a document."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
