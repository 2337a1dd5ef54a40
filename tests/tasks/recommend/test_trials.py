"""Short trainings of several models on the same rows, and the boosted trees beside them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import doors
import numpy as np
import pytest
from small_jobs import table_job, write_table

from trainwright.estimator.trace import source
from trainwright.tasks.data import dataset
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.recommend.proposals import proposals
from trainwright.tasks.recommend.reasons import against_trees
from trainwright.tasks.recommend.trials import probe
from trainwright.tasks.recommend.trials.boosted_trees import boosted_trees
from trainwright.tasks.recommend.trials.comparison import SHARES, Comparison
from trainwright.tasks.recommend.trials.trial import Array, Trial, train
from trainwright.tasks.runs.artefacts.recommendation import BoostedTrees
from trainwright.tasks.runs.model import ModelSource
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.recipe import with_recipe


def compare(folder: Path, limit_s: float = 60.0, steps: int | None = None) -> Comparison:
    """Two models for the small table, compared on its rows."""
    job = table_job(folder)
    chosen = proposals(dataset.describe(job.data), ["linear-small", "wide-small"])
    models = {one.name: (one.model(), with_recipe(job, one.recipe, []).train) for one in chosen}
    return probe.compare(models, job.data, job.train.seed, doors.settings(), limit_s, steps)


@pytest.mark.parametrize(
    ("deadline_s", "given_s", "seconds"),
    [(600.0, None, 60.0), (86_400.0, None, 120.0), (None, None, 120.0), (600.0, 300.0, 300.0)],
)
def test_a_comparison_takes_a_tenth_of_the_deadline_two_minutes_or_what_the_job_says(
    deadline_s: float | None, given_s: float | None, seconds: float
) -> None:
    assert probe.budget_s(deadline_s, given_s) == pytest.approx(seconds)


def test_models_are_compared_on_the_same_rows_and_equal_steps_give_equal_results(
    tmp_path: Path, home: Path
) -> None:
    found, again = (compare(tmp_path, limit_s=0.0, steps=100) for _ in range(2))
    for name, trial in found.trials.items():
        assert trial.steps == 100
        assert trial.error == pytest.approx(np.mean(trial.losses))
        assert trial.error < 0.3
        assert (again.trials[name].error, again.trials[name].losses) == (trial.error, trial.losses)
    assert len({len(trial.losses) for trial in found.trials.values()}) == 1


def test_a_comparison_within_a_time_gives_each_model_the_same_share_of_its_recipe(
    tmp_path: Path, home: Path
) -> None:
    found = compare(tmp_path)
    assert found.share in SHARES
    assert all(0 < trial.error < 0.4 for trial in found.trials.values())


@pytest.mark.parametrize("limit_s", [1.0, 4.5])
def test_too_little_time_gives_no_result(tmp_path: Path, home: Path, limit_s: float) -> None:
    assert compare(tmp_path, limit_s).trials == {}


def test_a_training_that_the_clock_ends_says_so(tmp_path: Path) -> None:
    data = dataset.load(table_job(tmp_path).data)
    (proposal,) = proposals(data.schema, ["linear-small"])
    model = proposal.model()
    definition = source.load(model.unpack(tmp_path), model.entry)
    spec = with_recipe(table_job(tmp_path), proposal.recipe, []).train
    ended = train(definition, data, spec, np.asarray(data.split.train), limit_s=1e-6)
    assert (ended.steps, ended.clocked) == (0, True)


def test_results_are_told_apart_row_by_row() -> None:
    draw = np.random.default_rng(0)
    hard = draw.uniform(0, 100, 400)

    def trial(losses: Array) -> Trial:
        return Trial(
            error=float(losses.mean()), losses=losses.tolist(), epochs=1, passes=1, seconds=1
        )

    first, a_bit_worse = trial(hard), trial(hard + 0.5)
    by_luck = trial(hard + 0.5 + draw.normal(0, 30, 400))
    assert probe.told_apart(first, a_bit_worse)
    assert not probe.told_apart(first, by_luck)
    diverged = Trial(error=np.inf, epochs=1, passes=1, seconds=1)
    assert probe.told_apart(first, diverged)


def run_source(text: bytes, folder: Path, limit_s: float = 20.0) -> Comparison:
    """A comparison of a model with this source."""
    job = table_job(folder)
    models = {"a": (ModelSource({"model.py": text}, "model.py"), job.train)}
    return probe.compare(models, job.data, 0, doors.settings(), limit_s)


def test_a_source_that_fails_in_a_comparison_is_one_line(tmp_path: Path, home: Path) -> None:
    with pytest.raises(BadInput, match="returned a int"):
        run_source(b"def build_model(): return 3\n", tmp_path)


def test_a_comparison_that_hangs_is_killed_and_has_no_result(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_START_S", 0.0)
    assert run_source(b"while True:\n    pass\n", tmp_path, 0.5).trials == {}


def test_a_comparison_gets_no_secret(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_S3_SECRET_KEY", "hidden")
    monkeypatch.setenv("OTHER_TOKEN", "hidden")
    told = b"import os\nraise ValueError(sorted(one for one in os.environ.items()))\n"
    with pytest.raises(TrainwrightError) as refused:
        run_source(told, tmp_path)
    assert "PATH" in str(refused.value)
    assert "hidden" not in str(refused.value)


def test_boosted_trees_learn_what_a_line_cannot(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    a, b = draw.uniform(-1, 1, 900), draw.uniform(-1, 1, 900)
    path = tmp_path / "t.csv"
    rows = [f"{x:.4f},{y:.4f},{'ab'[int(x * y > 0)]}" for x, y in zip(a, b, strict=True)]
    path.write_text("\n".join(["x,y,label", *rows]) + "\n")
    found = boosted_trees(dataset.load(DataSpec(uri=str(path))))
    assert found is not None
    assert found.metric > 0.9
    assert found.rows == 720


@pytest.mark.parametrize("lightgbm", [True, False])
def test_boosted_trees_stop_early_and_keep_rare_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lightgbm: bool
) -> None:
    if not lightgbm:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    draw = np.random.default_rng(0)
    x = draw.uniform(-1, 1, 2_000)
    labels = np.where(x + draw.normal(size=2_000) > 0, "yes", "no").astype(object)
    labels[:12] = [f"rare {n // 2}" for n in range(12)]
    path = tmp_path / "t.csv"
    path.write_text("x,label\n" + "".join(f"{a:.4f},{b}\n" for a, b in zip(x, labels, strict=True)))
    found = boosted_trees(dataset.load(DataSpec(uri=str(path))))
    assert found is not None
    assert found.library == ("LightGBM" if lightgbm else "scikit-learn")
    assert found.metric > 0.65  # of noise that 1,000 rounds without an end would learn by heart
    assert (found.rows, found.train_rows) == (1_600, 1_600)


def test_the_verdict_of_boosted_trees_says_what_they_reach_and_whether_they_are_better() -> None:
    trees = BoostedTrees(
        library="LightGBM", metric=0.9, rows=20_000, duration_s=3.0, train_rows=50_000
    )
    classes = "tabular-classification"
    assert against_trees(classes, "linear-small", 0.8, trees) == (
        "boosted trees are better by 10.0 points: they reach accuracy 0.9000 (LightGBM, 20,000 of "
        "50,000 training rows, 3.0 s); linear-small, the recommended model, is expected at 0.8000"
    )
    numbers = trees.model_copy(update={"metric": 12.7, "rows": 50_000})
    assert against_trees("tabular-regression", "tabm-small", 12.6, numbers) == (
        "boosted trees reach rmse 12.7 (LightGBM, 50,000 training rows, 3.0 s); tabm-small, the "
        "recommended model, is expected at 12.6"
    )


def test_boosted_trees_take_texts_gaps_and_numbers_as_targets(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv")
    spec = DataSpec(uri=str(path), target="a", missing="keep")
    found = boosted_trees(dataset.load(spec))
    assert found is not None
    assert 0 < found.metric < 1.2


def test_there_are_no_trees_for_images_or_for_one_class_in_training() -> None:
    digits = dataset.load(DataSpec(uri="builtin:digits"))
    assert boosted_trees(digits) is None
    table = replace(
        digits,
        schema=digits.schema.model_copy(update={"task": "tabular-classification"}),
        split=replace(digits.split, train=np.flatnonzero(digits.targets == 3)),
    )
    assert boosted_trees(table) is None
