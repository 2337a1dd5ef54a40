"""`PredictOperator` on a real stored model, outside a chain."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from airflow.sdk.exceptions import AirflowFailException
from stored_run import stored_run

from trainwright.operators import PredictOperator

MODEL = "def build_model(): return nn.Linear(2, 1)"


def context() -> Any:
    return {"dag_run": SimpleNamespace(dag_id="d", run_id="r")}


def test_a_task_predicts_rows_and_refuses_wrong_ones_for_good(home: Path, tmp_path: Path) -> None:
    values = [0.1 * n for n in range(40)]
    table = pa.table({"a": values, "b": values[::-1], "label": values})
    pq.write_table(table, tmp_path / "train.parquet")
    run = stored_run(tmp_path, MODEL, {"uri": str(tmp_path / "train.parquet")}, epochs=1)
    given: dict[str, Any] = {"task_id": "predict", "run": {"run": run.uri}}
    given |= {"rows": str(tmp_path / "train.parquet"), "out": str(tmp_path / "out.parquet")}
    found = PredictOperator(**given).execute(context())
    assert (found["run"], found["rows"], found["columns"]) == (run.uri, 40, ["prediction"])
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == 40
    pq.write_table(table.select(["a"]), tmp_path / "train.parquet")
    for changes, says in (
        ({"out": str(tmp_path / "no.parquet")}, "has no column 'b'"),
        ({"run": None}, "pass `run`, a finished run"),
        ({"out": "None"}, "pass `rows` and `out`"),
    ):
        with pytest.raises(AirflowFailException, match=says):
            PredictOperator(**given | changes).execute(context())
    assert not (tmp_path / "no.parquet").exists()
