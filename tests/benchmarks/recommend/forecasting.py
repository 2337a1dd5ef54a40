"""The templates for time series on half-hourly electricity demand, 48 steps ahead.

    python tests/benchmarks/recommend/forecasting.py
    python tests/benchmarks/recommend/forecasting.py --inner    # while developing
    python tests/benchmarks/recommend/forecasting.py --ets ets.csv

The last 28 days are held out, and forecast day by day from a history of a week, 336 steps. The
error is the mean absolute error, divided by that of the daily naive forecast on the rest. With
--inner, the first, third and fifth block of 28 days before them take their place, in turn, and all
that follows is left out. Known columns: the calendar and whether a day is a working day; the
temperature, which a forecast would not know, is left out.

--ets names a file with AutoETS's forecasts, one row of 48 numbers for each day, as
`forecasting_ets.py` writes it (in an environment of its own). Data: see package_data.py.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from package_data import electricity_demand
from plain_training import outputs, schema_of, trained

from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.runs.artefacts.data_schema import Column

HISTORY, HORIZON, DAY, HELD = 336, 48, 48, 28 * 48
BAR, BAR_RATIO = 0.677, 0.95


def main() -> None:
    """Print the scaled errors of naive forecasts and of each template by size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--inner", action="store_true", help="measure on earlier days")
    parser.add_argument("--ets", type=Path, help="AutoETS's forecasts")
    parser.add_argument("--seeds", type=int, default=5, help="trainings; default 5")
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "large"])
    parser.add_argument("--templates", nargs="+", default=["dlinear", "n-hits"])
    parser.add_argument("--calendar", action="store_true", help="without working days")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for block in (1, 3, 5) if asked.inner else (0,):
        measure(block, asked)


def measure(block: int, asked: argparse.Namespace) -> None:
    """Hold out 28 days; `block` others follow them in the data."""
    table = electricity_demand()
    end = len(table["Demand"]) - block * HELD
    demand, working = table["Demand"][:end], table["WorkDay"][:end]
    start = end - HELD
    stamps = pd.Series(pd.date_range("2014-01-01", periods=end, freq="30min")).dt
    columns = [
        (stamps.hour + stamps.minute / 60) / 24 - 0.5,
        stamps.day_of_week / 6 - 0.5,
        (stamps.day - 1) / 30 - 0.5,
        (stamps.month - 1) / 11 - 0.5,
    ] + ([] if asked.calendar else [working])
    covariates = np.stack(columns, 1).astype(np.float32)
    scale = float(np.abs(demand[DAY:start] - demand[: start - DAY]).mean())
    inputs, targets = _windows(demand, covariates, range(HISTORY, start - HORIZON + 1))
    held, wanted = _windows(demand, covariates, range(start, end - HORIZON + 1, DAY))

    def error(found: torch.Tensor) -> float:
        return float((found - wanted).abs().mean()) / scale

    naive = {
        "daily naive": error(held["history"][:, -DAY:]),
        "weekly naive": error(held["history"][:, :HORIZON]),
    }
    if asked.ets is not None and not block:
        naive["AutoETS"] = error(torch.from_numpy(np.loadtxt(asked.ets, delimiter=",")))
    print(f"block {block}: " + ", ".join(f"{name} {one:.4f}" for name, one in naive.items()))
    known = () if asked.calendar else (Column(name="WorkDay", kind="number"),)
    schema = schema_of("forecasting", inputs, columns=(Column(name="at", kind="time"), *known))
    for template in asked.templates:
        for size in asked.sizes:
            found, inside, started = [], [], time.process_time()
            for seed in range(asked.seeds):
                model, _ = trained(templates()[template], size, schema, inputs, targets, seed)
                found.append(error(outputs(model, held)))
                with torch.no_grad():
                    every = model(held, every=True)
                within = (wanted >= every[..., 0]) & (wanted <= every[..., -1])
                inside.append(float(within.double().mean()))
            spent = (time.process_time() - started) / asked.seeds
            mean = float(np.mean(found))
            met = mean <= BAR and mean <= BAR_RATIO * min(naive.values())
            print(
                f"  {template} {size}: {mean:.4f} (sd {np.std(found):.4f}), "
                f"{mean / min(naive.values()):.3f} of the best naive (bars {BAR}, {BAR_RATIO}: "
                f"{'met' if met else 'missed'}); {spent:.0f} s of CPU a fit; "
                f"{np.mean(inside):.3f} between the quantiles 0.1 and 0.9",
                flush=True,
            )


def _windows(
    demand: np.ndarray, covariates: np.ndarray, origins: range
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    history = np.stack([demand[one - HISTORY : one] for one in origins])
    known = np.stack([covariates[one - HISTORY : one + HORIZON] for one in origins])
    wanted = np.stack([demand[one : one + HORIZON] for one in origins])
    inputs = {"history": torch.from_numpy(history), "covariates": torch.from_numpy(known)}
    return inputs, torch.from_numpy(wanted)


if __name__ == "__main__":
    main()
