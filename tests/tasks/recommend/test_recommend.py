"""From data to ranked candidates and a source, without a run."""

from __future__ import annotations

import json
from pathlib import Path

import doors
import numpy as np
import pytest
from command_line import run
from small_jobs import table_job, write_table
from traced_once import trace_once, traced

from trainwright.tasks.data.prepared import prepared
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.recommend.recommender import advise, offers, untrained
from trainwright.tasks.recommend.source_code import is_as_generated
from trainwright.tasks.recommend.step import candidate_jobs, completed, recommend
from trainwright.tasks.spec.job import load_job
from trainwright.tasks.spec.pool import load_pool


@pytest.fixture(autouse=True)
def _alone(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_STORE", (tmp_path / "store").as_uri())
    trace_once(monkeypatch)


def write_job(folder: Path, **fields: object) -> str:
    """The job of `table_job` as a file."""
    path = folder / "job.json"
    job = table_job(folder)
    values = {"name": "small", "pool": job.pool, "data": {"uri": job.data.uri}} | fields
    values.setdefault("recommend", {"probe": False})
    path.write_text(json.dumps(values))
    return str(path)


def prepared_folders() -> list[Path]:
    """Files and folders with prepared data."""
    root = doors.settings().home / "prepared"
    return sorted(one for one in root.rglob("*") if one != root / "digests")


def test_the_command_ranks_candidates_and_writes_the_first_ones_source(tmp_path: Path) -> None:
    out = tmp_path / "made"
    command = ("recommend", write_job(tmp_path), "--out", str(out), "--json")
    done = run(*command)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["task"] == "tabular-classification"
    first = found["candidates"][0]
    assert found["chosen"] == first["name"]
    assert first["parameters"] > 0
    assert first["duration_s"]["low"] <= first["duration_s"]["median"]
    assert first["cost"]["median"] > 0
    assert first["why"]
    assert found["reason"].startswith(f"{found['notes'][0]}; 320 training rows")
    assert found["reference"]["metric"] > 0.5
    text = Path(found["source"]).read_text()
    assert text == found["source_text"]
    assert is_as_generated(text)
    again = json.loads(run(*command).stdout)
    assert again["source_text"] == text  # the same bytes


def test_an_edited_source_is_never_overwritten_and_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("# mine\n")
    done = run("recommend", write_job(tmp_path), "--out", str(tmp_path))
    assert done.returncode == 2
    assert "model.py: was edited, and edited files are never overwritten" in done.stderr
    assert (tmp_path / "model.py").read_text() == "# mine\n"


def test_the_screen_shows_a_table_and_the_reasons(tmp_path: Path) -> None:
    done = run("recommend", write_job(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("boosted trees ")
    assert any(line.startswith("models for tabular-classification") for line in lines)
    assert any(line.startswith("1. ") for line in lines)


def test_a_deadline_below_all_candidates_names_the_least_that_fits_which_then_does(
    tmp_path: Path,
) -> None:
    with pytest.raises(Infeasible, match=r"objective\.deadline: got 1 ms; the least that fits is"):
        recommend(table_job(tmp_path, objective={"deadline": "1ms"}), doors.settings())
    done = run("recommend", write_job(tmp_path), "--set", "objective.deadline=1ms", "--json")
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert error["binding"] == "deadline"
    assert prepared_folders() == []
    least = error["nearest_deadline_s"]
    found = recommend(table_job(tmp_path, objective={"deadline": f"{least}s"}), doors.settings())
    assert found.recommendation.candidates[0].feasible


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"recommend": {"templates": ["oracle"]}},
            r"recommend\.templates: got 'oracle'; allowed: ",
        ),
        ({"data": {"task": "custom"}}, "a custom task has no template"),
    ],
)
def test_without_a_template_one_line_says_so(
    tmp_path: Path, fields: dict[str, dict[str, object]], says: str
) -> None:
    uri = str(write_table(tmp_path / "table.csv"))
    if "data" in fields:
        fields = {"data": {"uri": uri, **fields["data"]}}
    with pytest.raises(BadInput, match=says):
        recommend(table_job(tmp_path, **fields), doors.settings())
    assert prepared_folders() == []


def test_a_refusal_leaves_data_that_was_prepared_before(tmp_path: Path) -> None:
    job = table_job(tmp_path, recommend={"templates": ["dlinear"]})
    prepared(job.data, doors.settings().home)
    before = prepared_folders()
    with pytest.raises(BadInput):
        recommend(job, doors.settings())
    assert prepared_folders() == before != []


def test_candidates_that_predictions_cannot_tell_apart_are_compared_on_rows(tmp_path: Path) -> None:
    names = ["linear-small", "wide-small"]
    job = write_job(tmp_path, recommend={"templates": names, "probe_steps": 60})
    done, again = (run("recommend", job, "--json") for _ in range(2))
    assert "comparing 2 candidates on rows, 60 steps each" in done.stderr
    found = json.loads(done.stdout)["candidates"]
    for candidate in found:
        assert candidate["probed_metric"] > 0.6
        assert candidate["predicted_metric"]["median"] >= candidate["probed_metric"]
        assert f"accuracy {candidate['probed_metric']:.4f} after 60 steps" in candidate["why"]
    assert [one["name"] for one in json.loads(again.stdout)["candidates"]] == [
        one["name"] for one in found
    ]
    skipped = json.loads(run("recommend", job, "--set", "recommend.probe=never", "--json").stdout)
    assert {one["probed_metric"] for one in skipped["candidates"]} == {None}


def test_the_offers_that_are_passed_are_ranked_and_no_others(tmp_path: Path) -> None:
    job, settings = table_job(tmp_path), doors.settings()
    data, pool = prepared(job.data, settings.home), load_pool(job.pool)
    two = [one for one in offers(job, data, pool) if one.size == "small"][:2]
    structures = traced(two, job, [], settings)
    job = untrained(job)
    found = advise(job, [], job.data, data, two, pool, structures, settings).recommendation
    assert {one.name for one in found.candidates} == {one.name for one in two}


def test_no_more_candidates_are_listed_than_asked_for_and_a_batch_fits_few_rows(
    tmp_path: Path,
) -> None:
    write_table(tmp_path / "table.csv", rows=60)
    found = recommend(table_job(tmp_path, recommend={"top": 1}), doors.settings()).recommendation
    assert len(found.candidates) == 1
    assert found.recipe["train.global_batch_size"] <= 48


def test_a_job_without_a_model_is_planned_with_the_recommended_one(tmp_path: Path) -> None:
    job = table_job(tmp_path, train={"epochs": 3})
    with completed(job, doors.settings()) as whole:
        assert whole.model is not None
        source = Path(whole.model.source)
        assert source.is_file()
        assert whole.train.epochs == 3
        assert whole.train.optimizer.name == "adamw"
    assert not source.exists()
    done = run("plan", write_job(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epochs"] > 5


def test_a_job_without_a_model_stands_for_its_best_candidates(tmp_path: Path) -> None:
    path = write_job(
        tmp_path,
        train={"epochs": 3},
        recommend={"probe": True, "probe_steps": 40, "templates": ["linear", "wide"]},
    )
    given = {"name": "other", "data": {"uri": "builtin:digits"}, "model": {"source": "m.py"}}
    first, *rest = candidate_jobs([given, path], 2, doors.settings())
    assert first == given
    assert 1 <= len(rest) <= 2
    for one in rest:
        assert isinstance(one, dict)
        (name,) = one["recommend"]["templates"]
        assert one["name"] == f"small-{name}"
        assert one["train"] == {"epochs": 3}  # the recipe may fill the rest
        assert one["recommend"]["probe"] == "never"
        found = recommend(load_job(one), doors.settings()).recommendation
        assert [candidate.name for candidate in found.candidates] == [name]


def test_the_command_leaves_the_jobs_own_model_out_of_account(tmp_path: Path) -> None:
    job = write_job(tmp_path, model={"source": "nowhere.py"})
    done = run("recommend", job, "--json")
    assert done.returncode == 0, done.stderr
    assert np.isfinite(json.loads(done.stdout)["candidates"][0]["duration_s"]["median"])
