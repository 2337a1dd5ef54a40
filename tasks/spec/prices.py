"""`prices` and `power` in a pool file: what devices cost, and what they draw."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from trainwright.tasks.spec.documents import Document

_MOST_PRICE = 1e9


def _prices(values: object) -> object:
    """{type: "2.1/h", energy: "0.25/kWh"} -> numbers."""
    if not isinstance(values, dict):
        return values
    parsed = {}
    for name, value in values.items():
        unit = "kWh" if name == "energy" else "h"
        match = (
            re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*/\s*" + unit + r"\s*", value)
            if isinstance(value, str)
            else None
        )
        price = math.inf if match is None else float(match.group(1))
        if price > _MOST_PRICE:
            raise ValueError(
                f"for {name} a number of zero or more per {unit}, such as 2.1/{unit}, "
                f"up to {_MOST_PRICE:,.0f}, not {str(value)[:80]!r}"
            )
        parsed[name] = price
    return parsed


def _price_texts(prices: dict[str, float]) -> dict[str, str]:
    return {
        name: f"{Decimal(repr(value)):f}/{'kWh' if name == 'energy' else 'h'}"
        for name, value in prices.items()
    }


Prices = Annotated[
    dict[str, float],
    BeforeValidator(_prices),
    PlainSerializer(_price_texts, return_type=dict[str, str]),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "string", "examples": ["2.1/h", "0.25/kWh"]},
        }
    ),
]
"""Per hour of a device type, and per kWh of energy, in the pool's currency."""


class Power(Document):
    """A device's power; overrides the datasheet."""

    idle_w: float = Field(ge=0, le=1e6, description="power while it waits")
    load_w: float = Field(gt=0, le=1e6, description="power while it computes")

    @model_validator(mode="after")
    def _ordered(self) -> Power:
        if self.idle_w > self.load_w:
            raise ValueError(f"idle_w up to load_w ({self.load_w:g}), not {self.idle_w:g}")
        return self
