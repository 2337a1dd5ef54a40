"""From data and a job without a model to ranked candidates and the source of the first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.estimator.predict.calibration import Calibration
from trainwright.estimator.structure import Structure
from trainwright.tasks import progress
from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.data.row_split import MIN_ROWS
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.recommend.candidate_costs import Costs, costs_of
from trainwright.tasks.recommend.candidates import (
    alike,
    as_metric,
    candidates,
    foremost,
    with_comparison,
)
from trainwright.tasks.recommend.proposals import Proposal, proposals
from trainwright.tasks.recommend.reasons import against_trees, described_data, why_predicted
from trainwright.tasks.recommend.similar_sets.benchmark_table import benchmark
from trainwright.tasks.recommend.similar_sets.data_figures import (
    MOST_ROWS,
    figures_of,
    metric_of,
    sampled,
)
from trainwright.tasks.recommend.similar_sets.metric_prediction import predict_metric
from trainwright.tasks.recommend.source_code import Header
from trainwright.tasks.recommend.trials import probe
from trainwright.tasks.recommend.trials.boosted_trees import boosted_trees
from trainwright.tasks.recommend.trials.comparison import Comparison
from trainwright.tasks.runs.artefacts.recommendation import BoostedTrees, Candidate, Recommendation
from trainwright.tasks.runs.model import ModelSource
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.eligibility import require_possible, usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.spec.recipe import with_recipe
from trainwright.tasks.units import counted, seconds


@dataclass(frozen=True)
class Advice:
    """A recommendation, and the model of its first candidate."""

    recommendation: Recommendation
    model: ModelSource

    @property
    def text(self) -> str:
        """The model's source file."""
        return self.model.files[self.model.entry].decode()

    def document(self, job: str, source: str | None = None) -> dict[str, Any]:
        """What `recommend --json` prints; `source`: the path of the written file."""
        document = self.recommendation.model_dump(mode="json")
        return {"job": job, **document, "source": source, "source_text": self.text}


def offers(job: Job, data: Dataset, pool: Pool) -> list[Proposal]:
    """The models that the data can have.

    Raises BadInput for an impossible job, for too little data, or if no model is left.
    """
    usable(pool, job)  # raises BadInput if there are too few
    require_possible(job, pool, data.schema.train_rows)
    if job.data.expectations is None:
        _require_enough(data)
    return proposals(data.schema, job.recommend.templates)


def _require_enough(data: Dataset) -> None:
    """Raise BadInput for data that an inferred suite rejects: too few rows, in all or of a class.

    A job with expectations of its own decides itself.
    """
    schema = data.schema
    if schema.rows < MIN_ROWS and schema.task != "forecasting":  # of series, rows are windows
        raise BadInput(f"data.uri: got {schema.rows} rows; allowed: at least {MIN_ROWS}")
    for name, rows in zip(schema.classes or [], data.class_rows(), strict=True):
        if rows != 1:
            continue
        raise BadInput(
            f"data.target: the class {name[:40]!r} has one row; allowed: at least two of each"
        )


def advise(
    job: Job,
    given: Collection[str],
    source: DataSpec,
    data: Dataset,
    offered: Sequence[Proposal],
    pool: Pool,
    structures: Mapping[str, Structure],
    settings: Settings,
    calibrations: Sequence[Calibration] = (),
) -> Advice:
    """What `offers` found for a job's data, ranked.

    `given`: the fields of the job that the user set. `source`: the data on this machine.
    `structures`: those of the offers, by name.

    Raises Infeasible with the least deadline if no candidate keeps the job's
    limits.
    """
    schema = data.schema
    costs = costs_of(offered, structures, job, given, pool, settings, calibrations)
    if all(one.plan is None for one in costs.values()):
        raise _nothing_fits(job, list(costs.values()))
    inputs, targets = data.batch(sampled(data.split.train, MOST_ROWS))
    trees = boosted_trees(data)
    trees_error = as_metric(schema.task, trees.metric) if trees else None
    figures = figures_of(schema, inputs, targets, trees=trees_error)
    predictions = {
        one.name: predict_metric(figures, schema.task, (one.template.name, one.size), benchmark())
        for one in offered
    }
    listed = candidates(schema, job.objective, costs, predictions)
    comparison = _compared(listed, job, given, source, costs, settings)
    if comparison is not None:
        listed = with_comparison(listed, schema.task, comparison, job.objective.minimize)
    first, prediction = listed[0], predictions[listed[0].name]
    chosen = costs[first.name].proposal
    verdict = [_verdict(schema.task, first, trees)] if trees else []
    reason = "; ".join([*verdict, described_data(schema, figures), f"{first.name}: {first.why}"])
    header = Header(
        data=f"{schema.rows:,} rows, target {schema.target}, SHA-256 {schema.sha256}",
        why=why_predicted(schema, prediction),
        command=f"trainwright recommend JOB --out FOLDER, where JOB is the file of job {job.name}",
    )
    recommendation = Recommendation(
        task=schema.task,
        metric=metric_of(schema.task),
        candidates=listed[: job.recommend.top],
        chosen=first.name,
        reason=reason,
        recipe=dict(chosen.recipe),
        figures=figures,
        neighbours=list(prediction.neighbours) if prediction else [],
        reference=trees,
        notes=verdict,
    )
    return Advice(recommendation, chosen.model(header))


def untrained(job: Job) -> Job:
    """The job for a recommendation that compares nothing on rows unless the user wants it."""
    options = job.recommend
    if options.probe != "auto":
        return job
    return job.model_copy(update={"recommend": options.model_copy(update={"probe": "never"})})


def _compared(
    listed: Sequence[Candidate],
    job: Job,
    given: Collection[str],
    source: DataSpec,
    costs: Mapping[str, Costs],
    settings: Settings,
) -> Comparison | None:
    """The best candidates on rows; None if the job wants none or predictions tell them apart.

    Candidates that predictions tell apart are compared only if the job wants it in any case.
    """
    options = job.recommend
    names = alike(listed) if options.probe == "auto" else foremost(listed)
    if options.probe == "never" or len(names) < 2:
        return None
    limit_s = probe.budget_s(job.objective.deadline, options.probe_time)
    many = counted(len(names), "candidate")
    length = f"{options.probe_steps} steps each" if options.probe_steps else seconds(limit_s)
    progress.emit("notice", message=f"recommend.probe: comparing {many} on rows, {length}")
    models = {}
    for name in names:
        proposal = costs[name].proposal
        models[name] = proposal.model(), with_recipe(job, proposal.recipe, given).train
    found = probe.compare(models, source, job.train.seed, settings, limit_s, options.probe_steps)
    if found.trials:
        return found
    message = f"{seconds(limit_s)} did not suffice to compare {many}"
    progress.emit("notice", message=f"recommend.probe: {message}")
    return None


def _verdict(task: str, first: Candidate, trees: BoostedTrees) -> str:
    predicted = first.predicted_metric
    expected = predicted.median if predicted else first.probed_metric
    return against_trees(task, first.name, expected, trees)


def _nothing_fits(job: Job, costs: Sequence[Costs]) -> Infeasible:
    """No candidate keeps the limits: the least deadline that fits, if it is the deadline."""
    late = [one for one in costs if one.least_deadline_s is not None]
    if not late or job.objective.deadline is None:
        refusal = costs[0].refusal
        assert refusal is not None
        return Infeasible(f"{costs[0].proposal.name}: {refusal}", **refusal.details)
    first = min(late, key=lambda one: one.least_deadline_s or 0.0)
    assert first.least_deadline_s is not None
    assert first.refusal is not None
    details = {**first.refusal.details, "candidate": first.proposal.name}
    return Infeasible(
        f"objective.deadline: got {seconds(job.objective.deadline)}; the least that fits is "
        f"{seconds(first.least_deadline_s)}, for {first.proposal.name} (of {len(costs)} "
        "candidates)",
        **details,
    )
