"""Compares a run with all earlier ones: the numbers, and the report (`tasks.analyze.report`).

The arithmetic is written once, on dataframes of Dask or, on request, pandas; a test checks that
both give the same numbers. Only result.json and status.json of other runs are read, so the cost
of an analysis does not depend on how long they were.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from trainwright.tasks.analyze.prediction_check import predicted_and_measured
from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.report_figures import Report
from trainwright.tasks.runs.artefacts.run_status import Manifest, Status
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run, list_runs
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.metric_names import leading_metric
from trainwright.tasks.store import seal_folder
from trainwright.tasks.units import is_rough

if TYPE_CHECKING:
    import pandas as pd

Engine = Literal["dask", "pandas"]
_SHOWN_RUNS = 200
LOCAL_CLUSTER_BYTES = 2 * 2**30
"""From this size on, processes of a LocalCluster read the parquet parts; below, threads do."""


def analyze(run: Run, engine: Engine = "dask") -> Report:
    """The report on a run whose training has finished, written to report/ and sealed there.

    Earlier runs that failed or are damaged are listed with that state. Raises FileNotFoundError
    if the run has no result.json.
    """
    from trainwright.tasks.analyze.layout_section import layout_section
    from trainwright.tasks.analyze.report import page

    result, plan, estimate = run.read(Result), run.find(Plan), run.find(Estimate)
    earlier = [one for one in list_runs(run.store_uri, run.settings) if one.id < run.id]
    ours_first = sorted(earlier, key=lambda one: one.job_name != run.job_name)
    others = ours_first[:_SHOWN_RUNS]
    target = run.job().train.target
    compared = history([run, *others], engine, target.metric if target else None)
    compared[0]["state"] = result.state  # its status is `running` until this step is done
    table = with_devices(_rows_of(run, "metrics/steps-rank"), result)
    report = Report(
        run=run.uri,
        runs_compared=len(others),
        engine=engine,
        epochs=[
            {name: _number(value) for name, value in row.items()}
            for row in _records(run, "metrics/epochs-")
        ],
        predicted_and_measured=predicted_and_measured(result, estimate, plan),
        devices=device_use(table, result, engine),
        history=compared,
    )
    search, validation = run.find(LearningRateSearch), run.find(Validation)
    layout = layout_section(plan, estimate, result) if plan else ""
    html = page(run, report, result, search, validation, table, run.find(Recommendation), layout)
    run.objects.delete(f"report/{Manifest.FILE}")  # it sealed the earlier report
    run.objects.put(report.html, html.encode())
    run.write(report)
    seal_folder(run, "report/")
    return report


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _parts(run: Run, prefix: str) -> list[tuple[str, int]]:
    return [(item.key, item.size) for item in run.objects.list(prefix)]


def _rows_of(run: Run, prefix: str) -> pd.DataFrame:
    """All parquet parts below a prefix as one frame, sorted by rank and step; read by Dask."""
    import dask
    import pandas as pd

    parts = _parts(run, prefix)

    if not parts:
        return pd.DataFrame()
    tasks = [dask.delayed(_part)(run.uri, run.settings, key) for key, _ in parts]
    if sum(size for _, size in parts) > LOCAL_CLUSTER_BYTES:
        from distributed import Client, LocalCluster

        before = set(os.environ)
        try:
            with LocalCluster(dashboard_address=None) as cluster, Client(cluster):
                frames = dask.compute(*tasks)
        finally:
            # LocalCluster passes variables (threads, malloc thresholds) to its processes through
            # our environment, and leaves them there.
            for name in set(os.environ) - before:
                del os.environ[name]
    else:
        frames = dask.compute(*tasks, scheduler="threads")
    return pd.concat(frames, ignore_index=True).sort_values(["rank", "step"], ignore_index=True)


def _part(run_uri: str, settings: Settings, key: str) -> pd.DataFrame:
    """One parquet part. Takes the run's URI, because a store's connection cannot be pickled."""
    import pandas as pd

    return pd.read_parquet(io.BytesIO(Run(run_uri, settings).objects.get(key)))


def _records(run: Run, prefix: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for key, _ in _parts(run, prefix):
        rows += pq.read_table(io.BytesIO(run.objects.get(key))).to_pylist()
    return sorted(rows, key=lambda row: row["step"])


def frame(table: pd.DataFrame, engine: Engine) -> Any:
    """A table as a Dask dataframe with partitions; unchanged for pandas."""
    if engine == "pandas":
        return table
    import dask.dataframe as dd

    return dd.from_pandas(table, npartitions=max(1, min(16, len(table) // 10_000 + 2)), sort=False)


def computed(value: Any) -> Any:
    """A Dask collection's value; anything else unchanged."""
    return value.compute(scheduler="threads") if hasattr(value, "compute") else value


_SPENT = {"computing": "compute_s", "waiting": "wait_s", "communicating": "communication_s"}
"""Rows of earlier versions lack the last one, and count it as waiting."""


def with_devices(table: pd.DataFrame, result: Result) -> pd.DataFrame:
    """Rows of steps, each with its `device`. (A rank's device may change with a new plan.)

    Rows of earlier versions have no device; they get the rank's device in the result.
    """
    if not len(table):
        return table
    names = (
        table["rank"]
        .map({device.rank: device.id for device in result.devices})
        .fillna(table["rank"].astype(str))
    )
    return table.assign(device=table["device"].fillna(names) if "device" in table else names)


def device_use(table: pd.DataFrame, result: Result, engine: Engine) -> list[dict[str, Any]]:
    """Per device: samples, samples/s, shares of time, peak memory, CPU time.

    `table` is the result of `with_devices`. The shares are computing, waiting and communicating.
    """
    sums: dict[Any, dict[str, float]] = {}
    if len(table):
        columns = [
            name for name in ("batch_size", "step_time_s", *_SPENT.values()) if name in table
        ]
        grouped = frame(table, engine).groupby("device")[columns].sum()
        sums = computed(grouped).to_dict("index")
    found = []
    for device in result.devices:
        mine = sums.get(device.id, {})
        spent = mine.get("step_time_s", 0.0)
        found.append(
            {
                "device": device.id,
                "type": device.type,
                "rank": device.rank,
                "batch_size": device.batch_size,
                "samples": int(mine.get("batch_size", 0)),
                "samples_per_s": mine["batch_size"] / spent if spent else None,
                **{
                    name: mine[column] / spent if spent and column in mine else None
                    for name, column in _SPENT.items()
                },
                "step_time_s": device.step_time_s.median if device.step_time_s else None,
                "peak_memory_bytes": device.peak_memory_bytes,
                "cpu_s": device.cpu_s,
            }
        )
    return found


def history(runs: Sequence[Run], engine: Engine, target: str | None = None) -> list[dict[str, Any]]:
    """Each run's outcome, in the given order: metrics, duration, energy, and its job's means.

    Its `result` is the value of `metric`, which is `target` if the run has that metric.
    """
    import dask
    import pandas as pd

    rows = dask.compute(*[dask.delayed(_outcome)(run, target) for run in runs], scheduler="threads")
    table = pd.DataFrame(list(rows))
    means = computed(
        frame(table, engine).groupby("job")[["duration_s", "energy_j", "accuracy"]].mean()
    )
    table = table.join(means.add_suffix("_mean_of_job"), on="job")
    return [
        {key: None if pd.isna(value) else value for key, value in row.items()}
        for row in table.to_dict("records")
    ]


def _outcome(run: Run, target: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run": run.uri,
        "id": run.id,
        "job": run.job_name,
        "state": "damaged",
        "started_at": None,
        "metric": None,
        "result": float("nan"),
        "accuracy": float("nan"),
        "loss": float("nan"),
        "duration_s": float("nan"),
        "energy_j": float("nan"),
        "duration_error": float("nan"),
        "devices": 0,
    }
    try:
        status, result = run.find(Status), run.find(Result)
    except CorruptArtefact:
        return row
    if status is not None:
        row |= {"state": status.state, "started_at": status.started_at}
    if result is not None:
        measured, predicted = result.measured, result.predicted
        metric = leading_metric(result.metrics, target)
        row |= {
            "metric": metric,
            "result": float("nan") if metric is None else result.metrics[metric],
            "accuracy": result.metrics.get("accuracy", float("nan")),
            "loss": result.metrics.get("loss", float("nan")),
            "duration_s": measured.duration_s,
            "energy_j": _or_nan(measured.energy_j),
            "devices": len(result.devices),
            "duration_error": (
                predicted.duration_s.median / measured.duration_s - 1
                if predicted
                and measured.duration_s
                and result.early_stopped is None
                and not is_rough(predicted.duration_s.low, predicted.duration_s.high)
                else float("nan")
            ),
        }
    return row


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
