"""Rows of series: wrong ones give one line; predictions get a row with its stamp for each step."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv
from stored_run import stored_run

from trainwright.tasks import progress
from trainwright.tasks.data.modalities.forecast_table import forecast_windows
from trainwright.tasks.errors import BadInput
from trainwright.tasks.inference import predict
from trainwright.tasks.inference.series_rows import ForecastColumns, SeriesRows
from trainwright.tasks.recommend.source_code import Header
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.runs.artefacts.data_schema import TimeStamps
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.data_spec import DataSpec

HISTORY, HORIZON = 6, 3
BEGIN = datetime(2026, 3, 1)
HOUR = TimeStamps(zone=None, step_us=3_600_000_000)
Rows = list[dict[str, Any]]


def columns(known: bool = False, stamps: TimeStamps | None = HOUR) -> ForecastColumns:
    return ForecastColumns(
        "hour", "shop", ["price"] if known else [], "sold", HISTORY, HORIZON, stamps
    )


def rows(known: int = HISTORY, future: int = HORIZON, shop: str = "a") -> Rows:
    """A series of an hour's step: known values of `sold`, then rows without."""
    return [
        {
            "hour": BEGIN + timedelta(hours=place),
            "shop": shop,
            "price": 1.0 + place,
            "sold": float(place % 4) if place < known else None,
        }
        for place in range(known + future)
    ]


def checked(found: Rows | pa.Table, of: ForecastColumns | None = None) -> SeriesRows:
    table = found if isinstance(found, pa.Table) else pa.Table.from_pylist(found)
    return SeriesRows.of(table, of or columns(), ["a", "b"], "x.parquet")


def without(given: Rows, *places: int) -> Rows:
    return [row for place, row in enumerate(given) if place not in places]


def other(given: Rows, place: int, **values: Any) -> Rows:
    return [row | values if at == place else row for at, row in enumerate(given)]


@pytest.mark.parametrize(
    ("given", "known", "says"),
    [
        (
            without(rows(8), 4),
            False,
            "rows: x.parquet: column 'hour': most time stamps are 1 hour apart, but "
            "2026-03-01 03:00:00 is followed by 2026-03-01 05:00:00; allowed: equal steps within",
        ),
        (without(rows(), 7), False, "2026-03-01 06:00:00 is followed by 2026-03-01 08:00:00"),
        ([*rows(), rows()[2]], False, "rows 2 and 9 both have 2026-03-01 02:00:00 of series 'a'"),
        ([*rows(), rows()[7]], False, "rows 7 and 9 both have 2026-03-01 07:00:00 of series 'a'"),
        (
            [*rows(), *rows(5, shop="b")],
            False,
            "rows: x.parquet: series 'b' has 5 known values of 'sold'; allowed: at least 6, the "
            "history that the run's model takes",
        ),
        (
            rows(9, 0),
            True,
            "rows: x.parquet: series 'a' has no rows after the last known 'sold', at 2026-03-01 "
            "08:00:00; allowed: 3 rows with an empty 'sold' and known values of price",
        ),
        (rows(9, 2), True, "series 'a' has 2 rows after the last known 'sold', at 2026-03-01 08"),
        (
            other(rows(9), 4, sold=None),
            False,
            "series 'a' has no 'sold' at 2026-03-01 04:00:00, but later ones",
        ),
        (other(rows(), 3, sold=float("inf")), False, "'sold' has an infinite number in row 3"),
        (other(rows(), 7, price=None), True, "the column 'price' has no value in row 7 (from 0)"),
        (other(rows(), 7, price=float("-inf")), True, "'price' has an infinite number in row 7"),
        (other(rows(), 7, hour=None), False, "1 of 9 time stamps are missing, the first in row 7"),
        (other(rows(), 7, shop=None), False, "column 'shop': 1 of 9 values are missing, the first"),
    ],
)
def test_rows_of_which_no_forecast_can_be_made_give_one_line(
    given: Rows, known: bool, says: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(says)) as raised:
        checked(given, columns(known))
    assert str(raised.value).startswith("rows: x.parquet: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("zone", "stamps", "says"),
    [
        (
            None,
            TimeStamps(zone="UTC", step_us=HOUR.step_us),
            "column 'hour' has no time zone, but the run's data the time zone UTC; allowed: time "
            "stamps with one",
        ),
        ("UTC", HOUR, "has the time zone UTC, but the run's data no time zone; allowed: time "),
        (
            None,
            TimeStamps(step_us=60_000_000),
            "stamps are 1 hour apart, but 1 minute in the run's",
        ),
    ],
)
def test_stamps_unlike_the_runs_give_one_line(
    zone: str | None, stamps: TimeStamps, says: str
) -> None:
    table = pa.Table.from_pylist(rows())
    table = table.set_column(0, "hour", table.column("hour").cast(pa.timestamp("us", zone)))
    with pytest.raises(BadInput, match=re.escape(says)):
        checked(table, columns(stamps=stamps))


def test_a_model_gets_stamps_in_the_runs_zone() -> None:
    table = pa.Table.from_pylist(rows())
    stamps = table.column("hour").cast(pa.timestamp("us", "Europe/Paris"))
    table = table.set_column(0, "hour", stamps)
    found = checked(table, columns(stamps=TimeStamps(zone="UTC", step_us=HOUR.step_us)))
    given = found.for_model().column("hour")
    assert given.type == pa.timestamp("us", "UTC")
    assert [one.replace(tzinfo=None) for one in given.to_pylist()] == [
        row["hour"] for row in rows()
    ]
    assert found.rows.column("hour").type == pa.timestamp("us", "Europe/Paris")


@pytest.mark.parametrize("kind", [pa.float64(), pa.int64(), pa.float32()])
def test_a_model_gets_nulls_for_values_to_forecast(kind: pa.DataType) -> None:
    nan = float("nan") if pa.types.is_floating(kind) else None
    given = [row | {"sold": nan} if row["sold"] is None else row for row in rows()]
    table = pa.Table.from_pylist(given)
    table = table.set_column(3, "sold", table.column("sold").cast(kind))
    values = checked(table).for_model().column("sold").to_pylist()
    assert values == [row["sold"] for row in rows()]


def forecast(*names: str) -> pa.Table:
    lists = [[float(HORIZON * place + step) for step in range(HORIZON)] for place in range(2)]
    return pa.table(
        {"shop": list(names), "prediction": lists[: len(names)], "low": lists[: len(names)]}
    )


def test_each_step_gets_the_series_and_stamp_of_its_row() -> None:
    mixed = [*rows(shop="b"), *rows(shop="a")]
    found = checked(list(reversed(mixed)), columns(known=True)).joined(forecast("b", "a"))
    assert found.column_names == ["prediction", "low", "shop", "hour"]
    future = [row["hour"] for row in rows()[HISTORY:]]
    assert found.column("shop").to_pylist() == ["b"] * HORIZON + ["a"] * HORIZON
    assert found.column("hour").to_pylist() == future * 2
    assert found.column("prediction").to_pylist() == found.column("low").to_pylist()
    assert found.column("prediction").to_pylist() == [0, 1, 2, 3, 4, 5]


def test_rows_after_the_horizon_are_not_forecast() -> None:
    found = checked(rows(9, HORIZON + 4)).joined(forecast("a"))
    assert found.column("hour").to_pylist() == [row["hour"] for row in rows(9)[9:]]


def as_text(stamp: datetime) -> str:
    return stamp.isoformat(" ")


@pytest.mark.parametrize("given", [0, 1])
def test_stamps_that_are_left_out_go_on_by_the_step(given: int) -> None:
    expected = [row["hour"] for row in rows()[HISTORY:]]
    found = checked(rows(future=given))
    assert found.joined(forecast("a")).column("hour").to_pylist() == expected
    assert found.for_model().column("sold").to_pylist()[HISTORY:] == [None] * HORIZON
    texts = [row | {"hour": as_text(row["hour"])} for row in rows(future=given)]
    joined = checked(texts).joined(forecast("a"))
    assert joined.column("hour").to_pylist() == list(map(as_text, expected))


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        ([31, 28, 31, 30, 31, 30], ["2026-07-31", "2026-08-31", "2026-09-30"]),
        ([5] * 6, ["2026-07-05", "2026-08-05", "2026-09-05"]),
    ],
)
def test_months_that_are_left_out_go_on_by_the_calendar(
    days: list[int], expected: list[str]
) -> None:
    given = [
        row | {"hour": f"2026-{month:02}-{day:02}"}
        for row, month, day in zip(rows(future=0), range(1, 7), days, strict=True)
    ]
    joined = checked(given, columns(stamps=TimeStamps(step_months=1))).joined(forecast("a"))
    assert joined.column("hour").to_pylist() == expected


def test_hours_go_on_over_a_change_of_clocks() -> None:
    zone = "Europe/Paris"
    given = [
        row | {"hour": datetime(2026, 3, 28, 19) + timedelta(hours=place)}
        for place, row in enumerate(rows(future=0))
    ]
    table = pa.Table.from_pylist(given)
    table = table.set_column(0, "hour", table.column("hour").cast(pa.timestamp("us", zone)))
    stamps = TimeStamps(zone=zone, step_us=HOUR.step_us)
    joined = checked(table, columns(stamps=stamps)).joined(forecast("a"))
    shown = [one.isoformat() for one in joined.column("hour").to_pylist()]
    assert shown == [
        "2026-03-29T03:00:00+02:00",
        "2026-03-29T04:00:00+02:00",
        "2026-03-29T05:00:00+02:00",
    ]


def test_predictions_without_steps_or_series_stay_as_they_are() -> None:
    found = checked([*rows(shop="a"), *rows(shop="b")])
    plain = pa.table({"prediction": [1.0, 2.0]})
    nameless = forecast("a", "b").drop_columns("shop")
    for given in (plain, nameless, forecast("a", "zzz")):
        assert found.joined(given) == given


def test_a_series_that_training_did_not_have_is_noticed() -> None:
    notices: list[str] = []
    with progress.listening(lambda event: notices.append(event["message"])):
        checked(rows(shop="zzz"))
        checked(rows(shop="b"))
    [notice] = notices
    assert "shop 'zzz' is not in the run's training part" in notice


@pytest.fixture(scope="module")
def sales(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of a generated model."""
    folder = tmp_path_factory.mktemp("sales")
    table = pa.Table.from_pylist([*rows(60, 0), *rows(60, 0, shop="b")])
    pq.write_table(table, folder / "sales.parquet")
    data = {
        "uri": str(folder / "sales.parquet"),
        "time": "hour",
        "series": "shop",
        "target": "sold",
        "history": 8,
        "horizon": HORIZON,
    }
    _, schema = forecast_windows(table, "0a1b2c", DataSpec.model_validate(data))
    template = templates()["dlinear"]
    code = template.source(schema, template.sizes["small"], Header("d", "w", "c"))
    return stored_run(folder, code.replace("from __future__ import annotations\n", ""), data)


def test_forecasts_of_a_run_can_be_joined_with_their_rows(sales: Run, tmp_path: Path) -> None:
    given = [*rows(20), *rows(10, shop="b")]
    pq.write_table(pa.Table.from_pylist(given), tmp_path / "rows.parquet")
    out = tmp_path / "out.parquet"
    found = predict(sales, str(tmp_path / "rows.parquet"), str(out))
    assert found.rows == 2 * HORIZON
    table = pq.read_table(out)
    wanted = [(row["shop"], row["hour"]) for row in given if row["sold"] is None]
    pairs = zip(table["shop"].to_pylist(), table["hour"].to_pylist(), strict=True)
    assert list(pairs) == wanted
    assert table.schema.field("prediction").type == pa.float64()
    ends = zip(*(table[name].to_pylist() for name in ("low", "prediction", "high")), strict=True)
    assert all(low <= middle <= high for low, middle, high in ends)
    # the same as CSV
    csv.write_csv(pa.Table.from_pylist(given), tmp_path / "rows.csv")
    predict(sales, str(tmp_path / "rows.csv"), str(tmp_path / "out.csv"))
    again = csv.read_csv(tmp_path / "out.csv")
    assert again["prediction"].to_pylist() == table["prediction"].to_pylist()


def test_a_run_refuses_stamps_with_a_zone_if_its_own_have_none(sales: Run, tmp_path: Path) -> None:
    table = pa.Table.from_pylist(rows(20))
    table = table.set_column(0, "hour", table.column("hour").cast(pa.timestamp("us", "UTC")))
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(BadInput, match="has the time zone UTC, but the run's data no time zone"):
        predict(sales, str(tmp_path / "rows.parquet"), str(tmp_path / "out.parquet"))
    assert not (tmp_path / "out.parquet").exists()
