"""Promotion as tasks: approvals and asset events, through Airflow's own accessors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from airflow.sdk import Asset
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from airflow.sdk.execution_time.context import OutletEventAccessors
from finished_run import sealed_run

from trainwright.operators import ApprovePromotionOperator, PromoteOperator
from trainwright.operators.assets import PROMOTED, announce, data_asset, model_asset
from trainwright.tasks.promote import find_alias


def context() -> Any:
    return {
        "dag_run": SimpleNamespace(dag_id="d", run_id="r"),
        "outlet_events": OutletEventAccessors(),
    }


def asset_events(given: Any) -> list[tuple[str, Any]]:
    return [
        (event.dest_asset_key.name, event.extra)
        for event in given["outlet_events"][PROMOTED].asset_alias_events
    ]


def test_a_promotion_is_an_event_with_metrics_unless_it_changes_nothing(
    home: Path, tmp_path: Path
) -> None:
    runs = [
        sealed_run(tmp_path.as_uri(), n, a, only_if_better="accuracy")
        for n, a in ((1, 0.9), (2, 0.8))
    ]
    first, again, worse = context(), context(), context()
    with structlog.testing.capture_logs() as records:
        for run, where in ((runs[0], first), (runs[0], again), (runs[1], worse)):
            PromoteOperator(task_id="promote", run=run.uri, outlets=[PROMOTED]).execute(where)
    assert [one["event"] for one in records if one["log_level"] == "info"] == [
        "promoted to production: production points at no model yet",
        "promoted to production: production already points at this run",
        "not promoted to production: accuracy 0.8 is not better than 0.9",
    ]
    ((name, extra),) = asset_events(first)
    assert (name, extra["run"], extra["metrics"]["accuracy"]) == (
        "model digits production",
        runs[0].uri,
        0.9,
    )
    assert asset_events(again) == asset_events(worse) == []


def test_a_models_event_goes_only_to_its_outlets() -> None:
    where, digits = context(), model_asset("digits")
    announce(where, [digits, model_asset("other")], digits, {"metrics": {"accuracy": 0.9}})
    assert where["outlet_events"][digits].extra == {"metrics": {"accuracy": 0.9}}
    assert where["outlet_events"][model_asset("other")].extra == {}


def test_permanent_errors_of_a_promotion_fail_without_a_retry(home: Path, tmp_path: Path) -> None:
    run = sealed_run(tmp_path.as_uri(), 1, None, only_if_better="accuracy")
    with pytest.raises(
        AirflowFailException, match=r"bad_input: promotion\.only_if_better: got 'accuracy'"
    ):
        PromoteOperator(task_id="promote", run=run.uri).execute(context())


def test_approval_is_requested_only_if_the_job_requires_it_and_the_model_is_better(
    home: Path, tmp_path: Path
) -> None:
    free = sealed_run(tmp_path.as_uri(), 1, 0.9, alias="production")
    held = sealed_run(
        tmp_path.as_uri(),
        2,
        0.95,
        alias="production",
        require_approval=True,
        only_if_better="accuracy",
    )
    assert ApprovePromotionOperator(task_id="a", run=free.uri).execute(context())["asked"] is False
    asks = ApprovePromotionOperator(task_id="a", run=held.uri, unattended=True)
    with pytest.raises(AirflowSkipException, match="given in Airflow's UI"):
        asks.execute(context())
    for line in (
        "| accuracy | 0.9500 | – |",
        f"/trainwright/page/#/run/digits/{held.id})",
        f"/trainwright/runs/digits/{held.id}/report)",
    ):
        assert line in asks.body
    better, _ = find_alias(held.root(), "digits", "production")
    assert better is None
    worse = sealed_run(
        tmp_path.as_uri(),
        3,
        0.5,
        alias="production",
        require_approval=True,
        only_if_better="accuracy",
    )
    PromoteOperator(task_id="promote", run=free.uri).execute(context())
    assert (
        ApprovePromotionOperator(task_id="a", run={"run": worse.uri}).execute(context())["asked"]
        is False
    )
    assert PromoteOperator(task_id="promote", run=worse.uri).execute(context())["promoted"] is False
    elsewhere = ApprovePromotionOperator(
        task_id="a", run=worse.uri, name="candidates", alias="best", unattended=True
    )
    with pytest.raises(
        AirflowSkipException, match="best: needs a person's approval"
    ):  # that alias does not exist yet
        elsewhere.execute(context())
    again = ApprovePromotionOperator(task_id="a", run=held.uri, unattended=True)
    with pytest.raises(AirflowSkipException):
        again.execute(context())
    assert "| accuracy | 0.9500 | 0.9000 |" in again.body
    assert f"[the current run](/trainwright/page/#/run/digits/{free.id})" in again.body


@pytest.mark.parametrize("wish", [{}, {"name": "candidates", "alias": "best"}])
@pytest.mark.parametrize(
    "answer",
    [
        None,
        False,
        "",
        "None",
        "yes",
        {"asked": False, "reason": ""},
        {"chosen_options": ["Reject"]},
    ],
)
def test_a_model_that_needs_approval_is_not_promoted_without_it(
    home: Path, tmp_path: Path, wish: dict[str, str], answer: Any
) -> None:
    run = sealed_run(tmp_path.as_uri(), 1, 0.9, require_approval=True)
    with pytest.raises(
        AirflowFailException,
        match=r"bad_input: promotion\.require_approval: .* a person's approval",
    ):
        PromoteOperator(task_id="promote", run=run.uri, approved=answer, **wish).execute(context())
    assert not list(run.root().list("models/"))


@pytest.mark.parametrize(
    "answer", [True, "True", {"chosen_options": ["Approve"], "params_input": {}}]
)
def test_an_approved_model_is_promoted(home: Path, tmp_path: Path, answer: Any) -> None:
    run = sealed_run(tmp_path.as_uri(), 1, 0.9, require_approval=True)
    assert (
        PromoteOperator(task_id="promote", run=run.uri, approved=answer).execute(context())[
            "promoted"
        ]
        is True
    )


@pytest.mark.parametrize(
    ("uri", "asset"),
    [
        ("s3://b/d.parquet", "s3://b/d.parquet"),
        ("/data/d.csv", "file:///data/d.csv"),
        ("builtin:digits", "x-trainwright://builtin/digits"),
    ],
)
def test_a_jobs_data_is_the_asset_of_its_uri(uri: str, asset: str) -> None:
    assert data_asset(uri) == Asset(asset)
