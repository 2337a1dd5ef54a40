"""The Assets that connect DAGs: a job's data, its models, the model that an alias names.

In a DAG of your own: `outlets=[Asset("s3://bucket/data.parquet")]` announces a job's data;
`schedule=[model_asset("digits")]` follows its models. The event's extra holds run and metrics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from airflow.sdk import Asset, AssetAlias, Context

MODELS = AssetAlias("trainwright-models")
"""Every stored model."""
PROMOTED = AssetAlias("trainwright-promoted-models")
"""Every promoted model."""


def data_asset(uri: str) -> Asset:
    """A job's data; `schedule.on_new_data` waits for an update of it."""
    if uri.startswith("builtin:"):
        return Asset(f"x-trainwright://builtin/{uri.removeprefix('builtin:')}")
    return Asset(uri if "://" in uri else f"file://{uri}")


def model_asset(job_name: str) -> Asset:
    """The models of a job: one event for each stored model."""
    return Asset(name=f"model {job_name}", uri=f"x-trainwright://models/{job_name}")


def alias_asset(job_name: str, alias: str) -> Asset:
    """The model that a job's alias names: one event for each change."""
    return Asset(name=f"model {job_name} {alias}", uri=f"x-trainwright://models/{job_name}/{alias}")


def announce(context: Context, outlets: Iterable[Any], asset: Asset, extra: dict[str, Any]) -> None:
    """Add an event of this asset to those of the task's outlets that announce it."""
    events = context["outlet_events"]
    for outlet in outlets:
        if isinstance(outlet, AssetAlias):
            events[outlet].add(asset, extra=extra)
        elif outlet == asset:
            events[outlet].extra = extra
