"""Step `recommend`: finds a model for the run's data, if the job names none."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.estimator.predict.calibration import Calibration
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.eligibility import require_possible, usable
from trainwright.tasks.spec.job import Job, ModelSpec, load_job
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.spec.recipe import with_recipe
from trainwright.tasks.units import counted

if TYPE_CHECKING:
    from trainwright.tasks.recommend.recommender import Advice

_GIVEN = "the job names its model"
_LONGEST_NAME = 63
"""characters of a job's name"""


def work(context: RunContext) -> Reference:
    """Recommend a model, and write its source into the run; a job's own model stays.

    A replay takes the replayed run's model.
    """
    run, replay = context.run, context.replay
    found = run.find(Recommendation)
    if found is None:
        job = run.read(RunJob)
        if job.model is not None:
            found = Recommendation(task=run.data().task, chosen=None, reason=_GIVEN, origin="given")
        elif replay is not None:
            found = replay.read(Recommendation)
            run.write_model(replay.model())
        else:
            settings = context.settings.replaced({"TRAINWRIGHT_STORE": run.store_uri})
            advice = recommend(job, settings)
            run.write_model(advice.model)
            found = advice.recommendation
        run.write(found)
    return {
        "artefact": Recommendation.FILE,
        "chosen": found.chosen,
        "reason": found.reason,
        "candidates": len(found.candidates),
        "notes": found.notes,
    }


def summary(reference: Reference) -> str:
    """One line: the boosted trees' verdict, then `realmlp-medium, the first of 5 candidates`."""
    if reference["chosen"] is None:
        return str(reference["reason"])
    chosen = f"{reference['chosen']}, the first of {counted(reference['candidates'], 'candidate')}"
    return "; ".join([*reference.get("notes", []), chosen])


def recommend(job: Job, settings: Settings, calibrations: Sequence[Calibration] = ()) -> Advice:
    """The ranked candidates for a job's data, and the first one's source. Needs no run.

    Data that gets none does not stay prepared, unless it was before. Raises BadInput, Infeasible.
    """
    from trainwright.tasks.data.prepared import prepared_if_used
    from trainwright.tasks.data.sources import localized
    from trainwright.tasks.recommend.candidate_costs import traced
    from trainwright.tasks.recommend.recommender import advise, offers

    given = (job if isinstance(job, RunJob) else RunJob.of(job)).given
    pool = load_pool(job.pool)
    usable(pool, job)  # before the data is read: raises BadInput if there are too few
    require_possible(job, pool)
    source = localized(job.data, settings)
    with prepared_if_used(source, settings.home, job.train.seed) as data:
        offered = offers(job, data, pool)
        structures = traced(offered, job, given, settings)
        return advise(job, given, source, data, offered, pool, structures, settings, calibrations)


@contextlib.contextmanager
def completed(
    job: Job, settings: Settings, calibrations: Sequence[Calibration] = ()
) -> Iterator[Job]:
    """The job with a model: its own, or inside the block the recommended one with its recipe.

    Candidates are not compared on rows unless `recommend.probe` says always.
    """
    from trainwright.tasks.recommend.recommender import untrained

    if job.model is not None:
        yield job
        return
    advice = recommend(untrained(job), settings, calibrations)
    with tempfile.TemporaryDirectory(prefix="trainwright-recommended-") as name:
        source = advice.model.unpack(Path(name)) / advice.model.entry
        trained = with_recipe(job, advice.recommendation.recipe, RunJob.of(job).given)
        yield trained.model_copy(update={"model": ModelSpec(source=str(source))})


def candidate_jobs(
    jobs: Sequence[str | dict[str, Any]], top: int, settings: Settings
) -> list[str | dict[str, Any]]:
    """The jobs, with one job for each of the best `top` candidates in place of one without a model.

    Jobs are files or mappings. A made job has the candidate's name added to its own. Raises
    BadInput, Infeasible.
    """
    from trainwright.tasks.recommend.recommender import untrained

    if not jobs:
        raise BadInput("jobs: got none; allowed: one or more job files, or jobs as mappings")
    found: list[str | dict[str, Any]] = []
    for given in jobs:
        job = load_job(given)
        if job.model is not None:
            found.append(given)
            continue
        listed = recommend(untrained(job), settings).recommendation.candidates
        values = job.model_dump(mode="json", exclude_unset=True)
        for one in [one for one in listed if one.feasible][:top]:
            options = {**values.get("recommend", {}), "templates": [one.name], "probe": "never"}
            name = f"{job.name[: _LONGEST_NAME - len(one.name) - 1]}-{one.name}"
            found.append({**values, "name": name, "recommend": options})
    return found
