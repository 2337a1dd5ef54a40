"""The parts `objective` and `devices` of a job: what the planner minimises, within what."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainwright.tasks.spec.documents import Document, Duration


class Objective(Document):
    """What the planner minimises, and the limits that it keeps."""

    minimize: Literal["energy", "cost", "time"] = Field(
        default="energy", description="the quantity to minimise"
    )
    deadline: Duration | None = Field(
        default=None, description="from the lease to the end of training, such as 30m"
    )
    budget: float | None = Field(
        default=None, ge=1e-9, le=1e12, description="highest cost, in the pool's currency"
    )
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = Field(
        default=0.9, description="probability with which the plan must keep the limits"
    )


class DeviceFilter(Document):
    """Which of the pool's devices may be used; by default all."""

    types: list[str] = Field(default_factory=list, description="device types; empty: all")
    hosts: list[str] = Field(default_factory=list, description="host names; empty: all")
    ids: list[str] = Field(default_factory=list, description="device ids; empty: all")
    exclude: list[str] = Field(default_factory=list, description="types, hosts or ids not to use")
    min_count: int = Field(default=1, ge=1, description="lowest number of devices")
    max_count: int | None = Field(default=None, ge=1, description="highest number of devices")

    @model_validator(mode="after")
    def _ordered(self) -> DeviceFilter:
        for field in ("types", "hosts", "ids", "exclude"):
            names = getattr(self, field)
            twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
            if twice is not None:
                raise ValueError(f"{field} with each name once, not {twice!r} twice")
        if self.max_count is not None and self.max_count < self.min_count:
            raise ValueError(
                f"max_count of at least min_count ({self.min_count}), not {self.max_count}"
            )
        return self
