"""The output of `show` for a finished run, and for a run with a killed launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run as command
from finished_run import begin_run, finished_training, write_checkpoints, write_outcome
from layout_plans import HEAVY, plan_and_estimate
from recommended_model import recommendation
from rich.console import Console

from trainwright.estimator.curves import Interval
from trainwright.tasks.cli.screens import console
from trainwright.tasks.cli.screens.runs.run_screen import show_run
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.recommendation import BoostedTrees
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.run import Run
from trainwright.tasks.store import seal
from trainwright.tasks.summary import summary

RATE = LearningRateSearch(
    learning_rate=0.01,
    interval=(0.001, 0.1),
    source="searched",
    reason="the loss is least there",
    plot="lr_search.html",
)


def shown(run: Run) -> tuple[dict[str, Any], list[str]]:
    """`show`'s document, and its lines of text."""
    asked = ("show", run.id, "--store", run.store_uri)
    document, screen = (command(*asked, *more) for more in (["--json"], ["--all"]))
    assert document.returncode == screen.returncode == 0
    return json.loads(document.stdout), [
        " ".join(line.split()) for line in screen.stdout.splitlines()
    ]


def test_the_summary_of_a_killed_run_names_its_newest_checkpoint(
    home: Path, tmp_path: Path
) -> None:
    run = begin_run(tmp_path.as_uri(), "killed", 1)
    document, lines = shown(run)
    assert (document["trained_steps"], document["checkpoints"]) == (None, [])
    assert not [line for line in lines if "checkpoint" in line]
    write_checkpoints(run, (True, False))
    document, lines = shown(run)
    paths = [f"{run.uri}/checkpoints/step-{step:08d}" for step in (10, 20)]
    assert (document["trained_steps"], document["checkpoints"]) == (20, paths)
    assert f"newest checkpoint of step 20: {paths[-1]}" in lines


def test_a_searched_learning_rate_has_its_reason_and_plot(home: Path, tmp_path: Path) -> None:
    run = finished_training(tmp_path.as_uri())
    document, lines = shown(run)
    assert document["learning_rate_plot"] is None
    assert "reason measured" in lines
    run.write(RATE)
    document, lines = shown(run)
    assert document["learning_rate_reason"] == "the loss is least there"
    at = lines.index("learning rate 0.01")
    assert lines[at + 1 : at + 3] == [
        "reason the loss is least there",
        f"plot of the search {run.uri}/lr_search.html",
    ]


@pytest.mark.parametrize(("currency", "unit"), [(None, "units"), ("EUR", "EUR")])
def test_a_cost_has_its_unit_and_no_exponent(
    home: Path, tmp_path: Path, currency: str | None, unit: str
) -> None:
    run = finished_training(tmp_path.as_uri())
    plan, result = run.read(Plan), run.read(Result)
    cost = Interval(median=2.54e-05, low=6.36e-06, high=0.0000604)
    assert plan.predicted is not None
    predicted = plan.predicted.model_copy(update={"cost": cost})
    run.write(plan.model_copy(update={"currency": currency, "predicted": predicted}))
    measured = result.measured.model_copy(update={"cost": 3e-05})
    run.write(result.model_copy(update={"measured": measured}))
    document, lines = shown(run)
    assert document["currency"] == currency
    figures = "0.0000254 0.0000064 0.0000604 0.0000300 inside"
    assert f"cost, {unit} {figures}" in lines


@pytest.mark.parametrize(
    ("reached", "says"), [(True, "reached"), (False, "not reached"), (None, "not known yet")]
)
def test_the_summary_says_whether_the_target_was_reached(
    home: Path, tmp_path: Path, reached: bool | None, says: str
) -> None:
    run = begin_run(tmp_path.as_uri(), "aimed", 1, target={"metric": "accuracy", "value": 0.97})
    if reached is not None:
        result = write_outcome(run, metrics={"accuracy": 0.95})
        run.write(result.model_copy(update={"target_reached": reached}))
    document, lines = shown(run)
    assert document["target"] == {"metric": "accuracy", "value": 0.97}
    assert f"target accuracy 0.97: {says}" in lines


def test_a_recommended_model_is_shown_with_its_reason_and_recipe(
    home: Path, tmp_path: Path
) -> None:
    run = finished_training(tmp_path.as_uri())
    assert shown(run)[0]["recommended"] is None
    run.write(run.read(RunJob).model_copy(update={"model": None}))
    run.write(recommendation())
    document, lines = shown(run)
    assert document["recommended"]["name"] == "linear-small"
    assert document["recommended"]["recipe"] == {"train.epochs": 30}
    assert "recommended model linear-small: it <is> the simplest" in lines
    assert "its recipe epochs 30" in lines


def test_the_summary_says_with_what_a_run_trained_and_whether_trees_are_better(
    home: Path, tmp_path: Path
) -> None:
    run = begin_run(tmp_path.as_uri(), "mixed", 1, epochs=5, schedule="cosine")
    stored = run.read(RunJob)
    named = {one["name"]: one["used"] for one in summary(run)["trained_with"]}
    assert (named["epochs"], named["schedule"]) == ("5", "cosine")
    run.write(stored.model_copy(update={"model": None, "given": ["train.schedule"]}))
    named = {one["name"]: one["used"] for one in summary(run)["trained_with"]}
    assert (named["epochs"], named["schedule"]) == ("by the recommended model", "cosine")
    trees = BoostedTrees(library="LightGBM", metric=0.96, rows=24, train_rows=48, duration_s=1.0)
    recipe = {"train.epochs": 100, "train.schedule": "flat-cosine"}
    found = recommendation().model_copy(update={"recipe": recipe, "reference": trees})
    run.write(found)
    given = ["train.global_batch_size", "train.schedule", "train.epochs"]
    run.write(stored.model_copy(update={"model": None, "given": given}))
    result = write_outcome(run, metrics={"accuracy": 0.95})
    run.write(result.model_copy(update={"target_reached": None}))
    document = summary(run)
    fields = {one["name"]: (one["used"], one["given"]) for one in document["trained_with"]}
    assert fields["model"] == ("linear-small (recommended)", None)
    assert fields["epochs"] == ("3 of 5", "5")
    assert fields["global batch"] == ("48", "auto")
    assert fields["schedule"] == ("cosine", None)
    assert [(one["kind"], one["good"], one["words"]) for one in document["verdicts"]] == [
        (
            "baseline",
            False,
            "Boosted trees are better: accuracy 0.9600, this model 0.9500 "
            "(LightGBM, 24 of 48 training rows).",
        )
    ]


def test_only_what_the_run_uses_of_a_recipe_is_shown(home: Path, tmp_path: Path) -> None:
    run = finished_training(tmp_path.as_uri())
    recipe = {"train.epochs": 30, "train.optimizer": {"name": "adam", "weight_decay": 0.5}}
    run.write(recommendation().model_copy(update={"recipe": recipe}))
    stored = run.read(RunJob)
    train = stored.train.model_copy(update={"epochs": 2})
    given = ["train.epochs", "train.optimizer.weight_decay"]
    run.write(stored.model_copy(update={"train": train, "given": given, "model": None}))
    assert shown(run)[0]["recommended"]["recipe"] == {"train.optimizer": {"name": "adam"}}


def test_the_layout_is_shown_with_its_reason_and_those_that_were_not_chosen(
    home: Path, tmp_path: Path
) -> None:
    run = finished_training(tmp_path.as_uri())
    assert shown(run)[0]["layout"] is None
    plan, estimate = plan_and_estimate(HEAVY)
    run.write(plan)
    run.write(estimate)
    document, lines = shown(run)
    assert document["layout"]["name"] == "hybrid"
    assert document["layout"]["words"] == plan.layout_in_words
    assert [one["layers"] for one in document["layout"]["by_layer"]] == [["conv"], ["fc6"], ["fc7"]]
    assert f"layout {plan.layout_in_words} ({plan.layout_rule})" in lines
    others = [one for one in plan.alternatives if one.layout_in_words]
    assert [f"not chosen {one.layout_in_words}; {one.reason}" for one in others] == [
        line for line in lines if line.startswith("not chosen ")
    ]
    assert len(others) == len(document["layout"]["others"]) == 3


def test_a_training_that_was_not_stored_says_so(home: Path, tmp_path: Path) -> None:
    run = finished_training(tmp_path.as_uri())
    run.note(state="success")
    document, lines = shown(run)
    assert (document["state"], document["manifest"]) == ("success", None)
    assert "state trained, not stored" in lines
    assert "not stored" in command("runs", "--store", run.store_uri).stdout
    seal(run)
    assert "state success" in shown(run)[1]
    assert "not stored" not in command("runs", "--store", run.store_uri).stdout


def test_a_finished_runs_summary_fits_a_screen_and_says_where_the_rest_is(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_training(tmp_path.as_uri())
    result = run.read(Result)
    many = [result.devices[0].model_copy(update={"id": f"here/cpu-{one}"}) for one in range(40)]
    run.write(result.model_copy(update={"devices": many}))
    document = summary(run) | {"run": "s3://store/runs/small/1"}
    document["steps"] = {"validate": 1.5, "estimate": 60.0, "allocate": 0.1, "train": 20.0}
    terminal = Console(width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "out", terminal)
    show_run(document, "trainwright show 1")
    _, *lines = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80
    assert lines[0] == "small: accuracy 0.9500; 40 CPUs, 20.0 s, 1 kJ"
    words = [" ".join(line.split()) for line in lines]
    assert "took 1 min 22 s; longest: estimate 1 min, train 20.0 s," in words
    assert "more trainwright show 1 --all" in words
    assert "devices (32 more with --all)" in words
    show_run(document, "trainwright show 1", everything=True)
    everything = capsys.readouterr().out
    assert everything.count("here/cpu-") == 40
    assert "reason" in everything


@pytest.mark.parametrize(
    ("ends", "row"),
    [
        ({"median": 3e40, "low": 2.0, "high": 1e90}, "duration, s not known - - 20.0"),
        (
            {"median": 147.0, "low": 12.0, "high": 7200.0},
            "duration, min about 2 min (rough) 0.20 120.00 0.33 inside",
        ),
    ],
)
def test_a_rough_prediction_says_only_its_order(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ends: dict[str, float],
    row: str,
) -> None:
    document = summary(finished_training(tmp_path.as_uri()))
    document["predicted"]["duration_s"] = ends
    show_run(document, "trainwright show 1")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert row in lines
