"""Schemas and rows of texts, images and time series for the tests of generated sources."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import torch

from trainwright.tasks.data.modalities.time_steps import calendar
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema

CLASSES = ["class “a”", "b\"'\\", "größe 大小"]
HISTORY, HORIZON = 12, 5
NAMES = ["north", "it's", "größe"]
"""the names of series"""


def _schema(task: Any, inputs: dict[str, tuple[int, ...]], target: str, **more: Any) -> DataSchema:
    return DataSchema(
        task=task,
        rows=1000,
        train_rows=800,
        validation_rows=200,
        inputs=inputs,
        input_dtypes=dict.fromkeys(inputs, "float32"),
        target=target,
        target_dtype="float32" if task == "forecasting" else "int64",
        sha256="0a1b2c",
        **more,
    )


def texts(length: int = 8, names: list[str] | None = None) -> DataSchema:
    """Texts. `names`: of the target and of the texts."""
    target, column = names or ["label", "message"]
    return _schema(
        "text-classification",
        {"inputs": (length,)},
        target,
        classes=CLASSES,
        columns=[Column(name=column, kind="text")],
    )


def images(shape: tuple[int, int, int] = (1, 8, 8), names: list[str] | None = None) -> DataSchema:
    """Images. `names`: of the target and of the images."""
    target, column = names or ["label", "image"]
    return _schema(
        "image-classification",
        {"inputs": shape},
        target,
        classes=CLASSES,
        columns=[Column(name=column, kind="image")],
    )


@dataclass(frozen=True)
class Series:
    """A table of time series: the number of known columns, and whether series have names."""

    known: int = 0
    named: bool = False

    def schema(self, names: list[str] | None = None) -> DataSchema:
        """`names`: of the target, the time, the series and the known columns."""
        target, time, series, *known = names or ["sold", "at", "shop", "price", "promo"]
        columns = [Column(name=time, kind="time")]
        columns += [Column(name=known[place], kind="number") for place in range(self.known)]
        inputs: dict[str, tuple[int, ...]] = {
            "history": (HISTORY,),
            "covariates": (HISTORY + HORIZON, 4 + self.known),
        }
        if self.named:
            columns.append(Column(name=series, kind="series", vocabulary=1 + len(NAMES)))
            inputs["series"] = ()
        return _schema("forecasting", inputs, target, columns=columns)

    def windows(self, count: int = 60) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Inputs and targets of a rank, one window from each hour on, of random walks."""
        torch.manual_seed(0)
        values = 100 + torch.randn(count + HISTORY + HORIZON).cumsum(0)
        covariates = torch.rand(len(values), 4 + self.known) - 0.5
        inputs = {
            "history": values.unfold(0, HISTORY, 1)[:count],
            "covariates": covariates.unfold(0, HISTORY + HORIZON, 1)[:count].transpose(1, 2),
        }
        if self.named:
            inputs["series"] = torch.arange(count) % (1 + len(NAMES))
        return inputs, values[HISTORY:].unfold(0, HORIZON, 1)[:count]

    def table(self, rows: int, future: int = HORIZON) -> dict[str, list[Any]]:
        """Raw rows of each series, the last `future` without a target."""
        start, table = datetime(2026, 2, 27, 21), dict[str, list[Any]]()
        for number, name in enumerate(NAMES if self.named else ["alone"]):
            for place in range(rows + future):
                row = {
                    "at": (start + timedelta(hours=place)).isoformat(),
                    "shop": name,
                    "price": number + place / 10,
                    "promo": place % 2,
                    "sold": 50.0 * number + place % 7 if place < rows else None,
                }
                for column, value in row.items():
                    table.setdefault(column, []).append(value)
        unused = ["price", "promo"][self.known :] + ([] if self.named else ["shop"])
        return {name: values for name, values in table.items() if name not in unused}

    def window(self, table: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
        """What a rank would make of the last rows of `table`, of which each series has as many."""
        names = NAMES if self.named else ["alone"]
        each = len(table["at"]) // len(names)
        inputs: dict[str, list[Any]] = {"history": [], "covariates": []}
        for number in range(len(names)):
            own = range((number + 1) * each - HISTORY - HORIZON, (number + 1) * each)
            rows = []
            for place in own:
                shown = np.array([table["at"][place]], "datetime64[us]").view(np.int64)
                known = [table[name][place] for name in ("price", "promo")[: self.known]]
                rows.append([*calendar(shown)[0].tolist(), *known])
            inputs["covariates"].append(rows)
            inputs["history"].append([table["sold"][place] for place in own[:HISTORY]])
        found = {name: torch.tensor(values) for name, values in inputs.items()}
        return found | ({"series": torch.tensor([1, 2, 3])} if self.named else {})
