"""Short trainings in one process, successive halving, and the boosted trees beside them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import doors
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_jobs import table_job, write_table

from trainwright.tasks.data import dataset
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.recommend.proposals import proposals
from trainwright.tasks.recommend.reasons import against_trees
from trainwright.tasks.recommend.trials import probe
from trainwright.tasks.recommend.trials.boosted_trees import boosted_trees
from trainwright.tasks.recommend.trials.probe import MOST, budget_s, halved, trial
from trainwright.tasks.recommend.trials.trial import Trial
from trainwright.tasks.runs.artefacts.recommendation import BoostedTrees
from trainwright.tasks.runs.model import ModelSource
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.recipe import with_recipe

names = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=MOST, unique=True)


@given(names, st.floats(1, 1000), st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_halving_keeps_its_time_and_ends_with_the_best_of_the_last_round(
    compared: list[str], total_s: float, given_errors: list[float]
) -> None:
    errors = dict(zip("abcdef", given_errors, strict=True))
    calls: list[tuple[str, int, float]] = []

    def run(name: str, rows: int, limit_s: float) -> Trial:
        calls.append((name, rows, limit_s))
        return Trial(error=errors[name], epochs=1, passes=1, seconds=limit_s)

    found = halved(compared, total_s, run)
    assert sum(limit for _, _, limit in calls) <= total_s
    if not calls:
        assert found == {}
        return
    assert set(found) == set(compared)
    assert list(found.values()) == sorted(found.values())
    last = max(rows for _, rows, _ in calls)
    assert next(iter(found)) in [name for name, rows, _ in calls if rows == last]


def test_a_probe_takes_at_most_a_tenth_of_the_deadline() -> None:
    assert budget_s(600.0) == pytest.approx(60.0)


def test_a_trial_in_its_own_process_learns_within_its_time(tmp_path: Path, home: Path) -> None:
    job = table_job(tmp_path)
    (proposal, *_) = proposals(dataset.describe(job.data))
    train = with_recipe(job, proposal.recipe, []).train
    made = trial(proposal.model(), job.data, train, doors.settings(), 200, 20.0)
    assert made.error < 0.3
    assert made.passes >= 1


def test_a_probe_in_which_a_trial_does_not_see_its_sample_once_says_nothing() -> None:
    made = Trial(error=0.9, epochs=1, passes=0.4, seconds=9)
    assert halved(["a", "b"], 100, lambda *_: made) == {}


def test_a_trial_that_runs_out_of_time_says_how_much_it_saw(tmp_path: Path, home: Path) -> None:
    job = table_job(tmp_path)
    (proposal, *_) = proposals(dataset.describe(job.data))
    train = with_recipe(job, proposal.recipe, []).train
    made = trial(proposal.model(), job.data, train, doors.settings(), 200, 1e-6)
    assert made.passes == 0


def test_a_source_that_fails_in_a_trial_is_one_line(tmp_path: Path, home: Path) -> None:
    job = table_job(tmp_path)
    broken = ModelSource({"model.py": b"def build_model(): return 3\n"}, "model.py")
    with pytest.raises(BadInput, match="returned a int"):
        trial(broken, job.data, job.train, doors.settings(), 200, 20.0)


def test_a_trial_that_hangs_is_killed_and_saw_nothing(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_START_S", 0.0)
    job = table_job(tmp_path)
    endless = ModelSource({"model.py": b"while True:\n    pass\n"}, "model.py")
    made = trial(endless, job.data, job.train, doors.settings(), 200, 0.5)
    assert made.passes == 0
    assert halved(["a", "b"], 100, lambda *_: made) == {}


def test_a_trial_gets_no_secret(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_S3_SECRET_KEY", "hidden")
    monkeypatch.setenv("OTHER_TOKEN", "hidden")
    job = table_job(tmp_path)
    told = b"import os\nraise ValueError(sorted(one for one in os.environ.items()))\n"
    with pytest.raises(TrainwrightError) as refused:
        trial(
            ModelSource({"model.py": told}, "model.py"),
            job.data,
            job.train,
            doors.settings(),
            200,
            20.0,
        )
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


def test_the_comparison_with_boosted_trees_says_their_rows() -> None:
    trees = BoostedTrees(
        library="LightGBM", metric=0.9, rows=20_000, duration_s=3.0, train_rows=50_000
    )
    said = against_trees("tabular-classification", "linear-small", 0.2, trees, "predicted")
    assert said.startswith("boosted trees (LightGBM, 20,000 of 50,000 training rows, 3.0 s): ")
    assert "the boosted trees win by 10.0 points" in said
    whole = trees.model_copy(update={"rows": 50_000})
    assert "50,000 training rows" in against_trees("tabular-classification", "l", 0.2, whole, "p")


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
