"""What the sources of all models for time series share.

Each window's history is standardised by its own mean and deviation, which the forecast gets back
(reversible normalisation, T. Kim et al. 2022). Effects of the calendar and of known columns are
learnt by step; a model forecasts what is left of the history without them. The forecast is
the median; two more quantiles are learnt beside it by the pinball loss (R. Koenker and G. Bassett,
1978), from inputs that pass no gradient on, so that they cost the median no accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.tasks.errors import BadInput
from trainwright.tasks.recommend.source_code import (
    Header,
    finished,
    shown,
    texts_assignment,
    texts_literal,
)
from trainwright.tasks.recommend.templates.template import ModelConfig, Template
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

_CALENDAR = 4
"""Columns of the calendar, which are the first covariates."""


@dataclass(frozen=True)
class SeriesColumns:
    """The columns of a table of time series and its windows, as a model gets them."""

    history: int
    horizon: int
    time: str
    known: list[str]
    """columns whose values are known for the horizon, in the order of the covariates"""
    series: str | None
    codes: int
    """numbers of series, with 0 for unknown ones"""

    @classmethod
    def of(cls, schema: DataSchema) -> SeriesColumns:
        """A schema's columns. Raises BadInput if it has no windows."""
        history = schema.inputs.get("history", (0,))[0]
        steps, columns = schema.inputs.get("covariates", (0, 0))
        times = [column.name for column in schema.columns if column.kind == "time"]
        known = [column.name for column in schema.columns if column.kind == "number"]
        series = [column for column in schema.columns if column.kind == "series"]
        if (
            schema.task != "forecasting"
            or not 1 < history < steps
            or len(times) != 1
            or columns != _CALENDAR + len(known)
        ):
            found = ", ".join(f"{name} {list(one)}" for name, one in schema.inputs.items())
            raise BadInput(
                f"data: got {schema.task} with {found or 'no inputs'}; allowed for a model for "
                "forecasting: that task, with windows of a table that has a time column (data.time)"
            )
        return cls(
            history,
            steps - history,
            times[0],
            known,
            series[0].name if series else None,
            max(1, series[0].vocabulary) if series else 0,
        )


@dataclass(frozen=True)
class ForecastNetwork:
    """Code of a family of models, in the form of `source_code.finished`."""

    layers: str
    """statements of the model's constructor, indented by 8; arguments are those of `build`"""
    methods: str
    """`forecast(history)`, from (rows, HISTORY) to (rows, HORIZON), and
    `start(history, targets)`, which sets the initial state from standardised training rows"""
    build: str
    """`build_model`"""
    arguments: str
    """the constructor's parameters besides `hidden`, such as `, width: int`"""
    before: str = ""
    """classes that it uses"""


def forecast_template(
    name: str, kind: str, network: ForecastNetwork, sizes: Mapping[str, ModelConfig]
) -> Template:
    """A family of models for time series. `kind`: words for the first line of its sources."""

    def source(schema: DataSchema, config: ModelConfig, header: Header) -> str:
        return _source(schema, kind, network, header, config)

    def recipe(schema: DataSchema, config: ModelConfig) -> dict[str, Any]:
        return {
            "train.optimizer": {"name": "adam"},
            "train.learning_rate": 0.003,
            "train.schedule": "cosine",
            "train.global_batch_size": 256,
            "train.epochs": 6,
        }

    return Template(name, ("forecasting",), sizes, source, recipe)


def _source(
    schema: DataSchema, kind: str, network: ForecastNetwork, header: Header, config: ModelConfig
) -> str:
    values = {name: str(value) for name, value in config.items()}
    windows = SeriesColumns.of(schema)
    with_series, with_known = windows.series is not None, bool(windows.known)
    names = {"TARGET": schema.target, "TIME": windows.time}
    names |= {"SERIES": windows.series} if windows.series is not None else {}
    shared = {
        "names": texts_assignment(names),
        "known": texts_literal("KNOWN", windows.known, 2),
        "codes_name": ", CODES" if with_series else "",
        "codes": f", {windows.codes}" if with_series else "",
        "history": str(windows.history),
        "horizon": str(windows.horizon),
        "columns": str(_CALENDAR + len(windows.known)),
        "embedded": " + 8" if with_series else "",
        "name": "rows[SERIES][place]" if with_series else "TARGET",
        "others": {
            (False, False): "[TARGET]",
            (False, True): "[SERIES]",
            (True, False): "KNOWN",
            (True, True): "[*KNOWN, SERIES]",
        }[with_known, with_series],
        "optional": "with known columns" if with_known else "or none: then steps are as before",
        "too_few": " or len(own) < count + HORIZON" if with_known else "",
        "arguments": network.arguments,
    }
    literals = (shared["names"], shared["known"])
    facts = {
        "series": with_series,
        "known": with_known,
        "json": any("json.loads" in one for one in literals),
    }
    before = f"{network.before.strip()}\n\n\n" if network.before else ""
    model = _MODEL.replace("# layers", network.layers.strip("\n"))
    code = [
        f"{_START.rstrip()}\n\n\n{before}{model.strip()}",
        f"{network.methods.strip(chr(10))}\n\n\n{network.build.strip()}\n\n\n{_END.strip()}",
    ]
    title = f"{kind}: forecasts {shown(schema.target, 40)}. Edit it as you like."
    return finished("\n\n".join(code), facts, {**shared, **values}, title, header)


_START = r'''
from __future__ import annotations

#? series
import hashlib
#? json
import json
#?
import sys
from datetime import datetime, timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Inputs = dict[str, Tensor]
$names
#? known
# Columns whose values are known for the horizon
$known
#?
HISTORY, HORIZON, COLUMNS$codes_name = $history, $horizon, $columns$codes
#? series


def hashed(name: Any) -> int:
    """A series' name as a whole number of 64 bits."""
    text = str(name).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
#?


def layers(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Two hidden layers; all outputs are 0 at first."""
    hidden = (nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
    last = nn.Linear(width, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*hidden, last)
'''

_MODEL = r'''
class Model(nn.Module):
    """Forecasts standardised histories, apart from what the calendar and columns do to a step."""

    def __init__(self, hidden: int$arguments) -> None:
        super().__init__()
        self.centre, self.scale = nn.Buffer(torch.zeros(COLUMNS)), nn.Buffer(torch.ones(COLUMNS))
        self.least = nn.Buffer(torch.tensor(1e-6))
        #? series
        self.hashes = nn.Buffer(torch.zeros(CODES - 1, dtype=torch.int64))
        self.series = nn.Embedding(CODES, 8)
        #?
        self.effects = layers(COLUMNS + 16$embedded, hidden, 1)
# layers
        self.sides = layers(COLUMNS + 16$embedded, hidden, 2)
        self.sides_by_step = nn.Parameter(torch.zeros(HORIZON, 2))

    def forward(self, inputs: Inputs, every: bool = False) -> Tensor:
        """All quantiles while training or if asked for; else the medians, (rows, HORIZON)."""
        columns, history = inputs["covariates"], inputs["history"]
        turns = 2 * torch.pi * columns[..., :4]
        parts = [((columns - self.centre) * self.scale).clamp(-5, 5), turns.sin(), turns.cos()]
        parts += [(2 * turns).sin(), (2 * turns).cos()]
        #? series
        parts.append(self.series(inputs["series"]).unsqueeze(1).expand(-1, columns.shape[1], -1))
        #?
        features = torch.cat(parts, 2)
        effects = self.effects(features).squeeze(2)
        mean, spread = history.mean(1)[:, None], history.std(1)[:, None].maximum(self.least)
        rest = (history - mean) / spread - effects[:, :HISTORY]
        median: Tensor = self.forecast(rest) + effects[:, HISTORY:]
        # The other quantiles pass no gradient on to the median; all gradients are standardised.
        sides = self.sides(features[:, HISTORY:].detach()) + self.sides_by_step
        low, high = functional.softplus(sides).unbind(2)
        found = torch.stack([median.detach() - low, median, median.detach() + high], 2)
        outputs = (found * spread[..., None] + mean[..., None]).detach() + (found - found.detach())
        return outputs if every or self.training else outputs[..., 1]
'''

_END = r'''
def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Twice the pinball losses of the quantiles, summed; of medians, the mean absolute error."""
    levels = outputs.new_tensor([0.1, 0.5, 0.9] if outputs.ndim > 2 else [0.5])
    error = targets.unsqueeze(2) - outputs.reshape(*targets.shape, len(levels))
    return 2 * torch.maximum(levels * error, (levels - 1) * error).sum(2).mean()


def example_batch(batch_size: int) -> tuple[Inputs, Tensor]:
    """Random inputs and targets."""
    covariates = torch.rand(batch_size, HISTORY + HORIZON, COLUMNS) - 0.5
    inputs = {"history": torch.randn(batch_size, HISTORY), "covariates": covariates}
    #? series
    inputs["series"] = torch.randint(CODES, (batch_size,))
    #?
    return inputs, torch.randn(batch_size, HORIZON)


def adapt(model: Model, inputs: Inputs, targets: Tensor, names: dict[str, list[str]]) -> None:
    """Set scales and initial weights from rows of the training part."""
    #? series
    known = [hashed(name) for name in names.get(SERIES, [])]
    if len(known) >= CODES:
        raise ValueError(f"{SERIES!r} has {len(known)} values; this file is for {CODES - 1}")
    model.hashes[: len(known)] = torch.tensor(known, dtype=torch.int64)
    #?
    deviation, mean = torch.std_mean(inputs["covariates"], (0, 1))
    model.centre.copy_(mean)
    model.scale.copy_(torch.where(deviation > 1e-6 * mean.abs(), 1 / deviation, 0))
    deviation, mean = torch.std_mean(inputs["history"].double(), 1, keepdim=True)
    model.least.copy_((deviation.mean() / 100).clamp_min(1e-9))
    deviation = deviation.maximum(model.least)
    model.start((inputs["history"] - mean) / deviation, (targets - mean) / deviation)


def calendar(stamp: datetime) -> list[float]:
    """The first covariates: time of day, weekday, month day and month, from -0.5 to 0.5."""
    hours = stamp.hour + stamp.minute / 60 + stamp.second / 3600
    parts = (hours / 24, stamp.weekday() / 6, (stamp.day - 1) / 30, (stamp.month - 1) / 11)
    return [part - 0.5 for part in parts]
#? !known


def up_to_horizon(times: list[datetime]) -> list[datetime]:
    """Adds stamps: by months if all are on one day of the month, or on its last; else by time."""
    step = times[-1] - times[-2]
    shift = timedelta(all((one + timedelta(1)).day == 1 for one in times))
    months = round(step.days / 30.44) if len({(one + shift).day for one in times}) == 1 else 0
    while len(times) < HISTORY + HORIZON:
        last = times[-1] + shift
        middle = last.replace(day=15) + timedelta(round(30.44 * months))
        times.append(middle.replace(day=last.day) - shift if months else last + step)
    return times
#?


def predict(model: Model, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The HORIZON values after the last known one, a list for each series.

    Raw rows by column, with dates or ISO 8601 stamps: HISTORY or more values of the target, then
    HORIZON rows without (None), $optional.
    """
    stamps = [datetime.fromisoformat(str(one)) for one in rows[TIME]]
    places: dict[Any, list[int]] = {}
    for place in sorted(range(len(stamps)), key=stamps.__getitem__):
        places.setdefault($name, []).append(place)
    inputs: dict[str, Any] = {"history": [], "covariates": []}
    for name, own in places.items():
        values = [rows[TARGET][place] for place in own]
        count = len(values) - values.count(None)
        if count < HISTORY or None in values[:count]$too_few:
            raise ValueError(f"{name!r}: {count} values; allowed: {HISTORY}, then {HORIZON} rows")
        #? known
        used = own[count - HISTORY : count + HORIZON]
        covariates = [
            calendar(stamps[place]) + [float(rows[one][place]) for one in KNOWN] for place in used
        ]
        inputs["covariates"].append(covariates)
        #? !known
        times = up_to_horizon([stamps[place] for place in own[count - HISTORY : count + HORIZON]])
        inputs["covariates"].append([calendar(one) for one in times])
        #?
        inputs["history"].append([float(one) for one in values[count - HISTORY : count]])
    inputs = {name: torch.tensor(values).to(model.centre) for name, values in inputs.items()}
    #? series
    codes = {one: code for code, one in enumerate(model.hashes.tolist(), 1)}
    inputs["series"] = torch.tensor([codes.get(hashed(one), 0) for one in places]).to(model.hashes)
    #?
    with torch.no_grad():
        found = model(inputs, every=True).permute(2, 0, 1).tolist()
    #? series
    return {SERIES: list(places), "low": found[0], "prediction": found[1], "high": found[2]}
    #? !series
    return {"low": found[0], "prediction": found[1], "high": found[2]}
    #?


if __name__ == "__main__":
    model, steps = build_model(), HISTORY + HORIZON
    with torch.no_grad():
        adapt(model, *example_batch(64), {})
    sys.stdout.write(f"{model}\n{sum(one.numel() for one in model.parameters()):,} parameters\n")
    rows: dict[str, list[Any]] = {name: [1.0] * steps for name in $others}
    rows[TIME] = [datetime(2026, 1, 1) + timedelta(one) for one in range(steps)]
    rows[TARGET] = [float(one % 7) for one in range(HISTORY)] + [None] * HORIZON
    sys.stdout.write(f"{predict(model, rows)}\n")
'''
