"""An alias points at the better model, even with concurrent writers; on a folder and on S3."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import doors
import pytest
from finished_run import sealed_run
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.errors import BadInput, CorruptArtefact
from trainwright.tasks.promote import (
    best_of,
    compare,
    promote,
)
from trainwright.tasks.runs.alias import Alias, alias_key, find_alias
from trainwright.tasks.spec.metric_names import Metric, better_is


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return (tmp_path / "store").as_uri()
    request.getfixturevalue("s3")
    return f"s3://promotions/{tmp_path.name}"


def test_the_alias_moves_only_to_a_better_model(store: str) -> None:
    wish = {"alias": "production", "only_if_better": "accuracy"}
    first, worse, better = (
        sealed_run(store, n, a, **wish) for n, a in ((1, 0.9), (2, 0.8), (3, 0.95))
    )
    assert promote(first)["promoted"] is True
    refused = promote(worse)
    assert (refused["promoted"], refused["reason"]) == (
        False,
        "accuracy 0.8 is not better than 0.9",
    )
    assert promote(better)["promoted"] is True
    alias, _ = find_alias(first.root(), "digits", "production")
    assert alias is not None
    assert (alias.run, alias.previous, alias.metrics["accuracy"]) == (better.uri, first.uri, 0.95)
    again = promote(better)
    assert (again["promoted"], again["current"]) == (True, better.uri)
    assert find_alias(first.root(), "digits", "production")[0] == alias


def test_the_best_of_concurrent_runs_keeps_the_alias(store: str) -> None:
    accuracies = [0.5, 0.9, 0.7, 0.8, 0.6, 0.85]
    runs = [
        sealed_run(store, n, a, only_if_better="accuracy")
        for n, a in enumerate(accuracies, start=1)
    ]
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(promote, runs))
    alias, _ = find_alias(runs[0].root(), "digits", "production")
    assert alias is not None
    assert alias.run == runs[1].uri


def test_a_job_without_promotion_changes_no_alias(tmp_path: Path) -> None:
    run = sealed_run(tmp_path.as_uri(), 1, 0.9)
    assert promote(run)["reason"] == "the job has no `promotion`"
    assert not list(run.root().list("models/"))


def test_a_run_changed_after_sealing_is_not_promoted(tmp_path: Path) -> None:
    run = sealed_run(tmp_path.as_uri(), 1, 0.9, alias="production")
    run.objects.put("model/model.safetensors", b"other")
    with pytest.raises(
        CorruptArtefact, match=r"differs from what was sealed: changed model/model.safetensors"
    ):
        promote(run)
    assert not list(run.root().list("models/"))


def test_a_metric_that_the_model_lacks_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    run = sealed_run(tmp_path.as_uri(), 1, None, only_if_better="accuracy")
    with pytest.raises(
        BadInput, match=r"promotion.only_if_better: got 'accuracy'; allowed: .* one of loss"
    ):
        promote(run)


def test_a_damaged_alias_is_reported_and_not_replaced(tmp_path: Path) -> None:
    run = sealed_run(tmp_path.as_uri(), 1, 0.9, alias="production")
    run.root().put(alias_key("digits", "production"), b"{")
    with pytest.raises(CorruptArtefact, match=r"alias-production.json"):
        promote(run)
    assert run.root().get(alias_key("digits", "production")) == b"{"


@pytest.mark.parametrize("name", ["<script>", "../../x", "a/b", ""])
def test_a_name_with_a_path_is_refused(tmp_path: Path, name: str) -> None:
    run = sealed_run(tmp_path.as_uri(), 1, 0.9)
    with pytest.raises(BadInput, match="promotion: name"):
        promote(run, name, "best")
    with pytest.raises(BadInput, match="promotion: alias"):
        promote(run, "ok", name or " ")


def test_the_best_of_several_jobs_is_found_and_named(tmp_path: Path) -> None:
    runs = [
        sealed_run(tmp_path.as_uri(), 1, a, name=f"job-{n}", only_if_better="loss")
        for n, a in enumerate((0.5, 0.9, 0.7))
    ]
    found = best_of((run.uri for run in runs), doors.settings())
    assert (found["run"], found["metric"]) == (runs[1].uri, "loss")
    assert [one["run"] for one in found["ranking"]] == [runs[1].uri, runs[2].uri, runs[0].uri]
    assert (
        promote(doors.run_at(found["run"]), "candidates", "best")["artefact"]
        == "models/candidates/alias-best.json"
    )
    with pytest.raises(BadInput, match="candidates: no run"):
        best_of([], doors.settings())


def test_every_metric_of_a_job_has_its_direction() -> None:
    falling = {one for one in get_args(Metric) if better_is(one) == "less"}
    assert falling == {"loss", "log_loss", "rmse", "mae", "mase"}


@given(st.floats(), st.floats(), st.sampled_from(["accuracy", "loss", "val_loss", "rmse", "f1"]))
def test_at_most_one_of_two_models_is_better_and_never_one_with_nan(
    new: float, old: float, metric: str
) -> None:
    def wins(value: float, against: float) -> bool:
        current = Alias.model_construct(
            alias="a", job="j", run="other", metrics={metric: against}, promoted_at=""
        )
        return compare("me", "a", metric, {metric: value}, current).promoted

    assert not (wins(new, old) and wins(old, new))
    if new != new or new in (float("inf"), float("-inf")):
        assert not wins(new, old)
    elif abs(old) < 1e300 and new != old:
        assert wins(new, old) == ((new < old) == (better_is(metric) == "less"))
