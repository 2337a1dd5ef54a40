"""The chain for a job without a model, from the data to the stored model, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import doors
import pytest
from small_jobs import table_job
from traced_once import trace_once

from trainwright.tasks import chain
from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.run import Run
from trainwright.tasks.store import load_model


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run with a stored model, of a job that sets the epochs and names no model."""
    folder = tmp_path_factory.mktemp("recommended")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINWRIGHT_HOME", str(folder / "home"))
        trace_once(patch)
        job = table_job(folder, train={"epochs": 4})
        run = doors.open_for(job, Holder("me"), store=(folder / "store").as_uri())
        doors.do(run, "store")
        yield run
        doors.ledger().release(run.uri)


def test_the_runs_model_is_the_generated_source(stored: Run) -> None:
    found = stored.read(Recommendation)
    model = stored.model()
    assert model.origin == "recommended"
    assert model.entry == "model.py"
    assert found.chosen == found.candidates[0].name
    header = model.files["model.py"].decode().split('"""')[1]
    assert stored.data().sha256[:12] in header.replace("\n", "").replace(" ", "")


def test_the_recipe_fills_what_the_user_did_not_set_in_every_step(stored: Run) -> None:
    recipe = stored.read(Recommendation).recipe
    job = stored.job()
    assert job.train.epochs == 4
    assert job.train.optimizer.name == recipe["train.optimizer"]["name"]
    assert job.train.learning_rate == recipe["train.learning_rate"]
    assert stored.read(RunJob).train.learning_rate == "auto"
    search = stored.read(LearningRateSearch)
    assert search.reason == "of the recommended model's recipe"


def test_the_stored_model_is_the_trained_one(stored: Run, tmp_path: Path) -> None:
    model = load_model(stored.uri, tmp_path / "code")
    assert sum(one.numel() for one in model.parameters()) == (
        stored.read(Recommendation).candidates[0].parameters
    )
    signature = json.loads(stored.objects.get("model/signature.json"))
    assert signature["target"]["classes"] == ["no", "yes"]


def test_a_replay_takes_the_replayed_runs_model(
    stored: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_HOME", str(stored.settings.home))
    job = table_job(Path(stored.job().data.uri).parent, train={"epochs": 4})
    other = (tmp_path / "store").as_uri()
    run = doors.open_for(job, Holder("again"), store=other, new=True)
    doors.do(run, "recommend", replay=stored.uri)
    doors.ledger().release(run.uri)
    assert run.model() == stored.model()
    assert run.read(Recommendation) == stored.read(Recommendation)


def test_a_step_of_a_sealed_run_does_not_do_earlier_steps_again(stored: Run) -> None:
    chain.do(doors.attach(stored), "validate")
    kept = stored.objects.get(Recommendation.FILE)
    stored.objects.delete(Recommendation.FILE)
    try:
        with pytest.raises(CorruptArtefact, match="missing"):
            doors.do(stored, "analyze")
        assert not (Path(stored.uri.removeprefix("file://")) / Recommendation.FILE).exists()
    finally:
        stored.objects.put(Recommendation.FILE, kept)


def test_a_job_that_names_its_model_keeps_it(tmp_path: Path, home: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\ndef build_model(): return torch.nn.Linear(2, 2)\n"
    )
    (tmp_path / "table.csv").write_text(
        "a,b,label\n" + "".join(f"{n},{n % 3},{'xy'[n % 2]}\n" for n in range(60))
    )
    job = table_job(tmp_path, model={"source": str(tmp_path / "m.py")})
    run = doors.open_for(job, Holder("me"), store=(tmp_path / "store").as_uri())
    try:
        reference = doors.do(run, "recommend")
    finally:
        doors.ledger().release(run.uri)
    assert reference["chosen"] is None
    assert reference["reason"] == "the job names its model"
    assert run.model().origin == "given"
    assert run.job() == run.read(RunJob)
