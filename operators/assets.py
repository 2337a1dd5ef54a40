"""The Assets by which DAGs hear of one another: a job's data, its models, the model that an alias names.

What others' DAGs write: `outlets=[Asset("s3://bucket/data.parquet")]` for a job's data; `schedule=[model_asset("digits")]` to
follow its models. The event's extra holds run and metrics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from airflow.sdk import Asset, AssetAlias, Context

MODELS = AssetAlias("trainwright-models")
"""every model that is stored"""
PROMOTED = AssetAlias("trainwright-promoted-models")
"""every model that an alias comes to name"""


def data_asset(uri: str) -> Asset:
    """A job's data: an update of it is what `schedule.on_new_data` waits for."""
    if uri.startswith("builtin:"):
        return Asset(f"x-trainwright://builtin/{uri.removeprefix('builtin:')}")
    return Asset(uri if "://" in uri else f"file://{uri}")


def model_asset(job_name: str) -> Asset:
    """The models of a job: one event for each that is stored."""
    return Asset(name=f"model {job_name}", uri=f"x-trainwright://models/{job_name}")


def alias_asset(job_name: str, alias: str) -> Asset:
    """The model that an alias of a job names: one event for each change."""
    return Asset(name=f"model {job_name} {alias}", uri=f"x-trainwright://models/{job_name}/{alias}")


def announce(context: Context, outlets: Iterable[Any], asset: Asset, extra: dict[str, Any]) -> None:
    """Say on every outlet of the task that is meant for it what happened to an asset."""
    events = context["outlet_events"]
    for outlet in outlets:
        if isinstance(outlet, AssetAlias):
            events[outlet].add(asset, extra=extra)
        elif outlet == asset:
            events[outlet].extra = extra
