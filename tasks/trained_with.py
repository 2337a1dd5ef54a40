"""With what a run trained: each field as it was used, and as the job gave it if that differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.value import Value
from trainwright.tasks.spec.job import Job
from trainwright.tasks.units import plain, seconds


class UsedField(Value):
    """A field of the job, for people."""

    field: str
    """its dotted name"""
    name: str
    used: str
    given: str | None
    """what the job says, if it says something else"""


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run: the stored job, that with the recipe, and the steps' artefacts."""

    stored: RunJob
    job: Job
    recommendation: Recommendation | None
    plan: Plan | None
    search: LearningRateSearch | None
    result: Result | None


_OF_RECIPE = "by the recommended model"


def trained_with(facts: RunFacts) -> list[UsedField]:
    """The fields in the order in which people ask for them."""
    return [
        UsedField(
            field=field, name=name, used=used, given=given if given not in (None, used) else None
        )
        for field, name, used, given in _fields(facts)
    ]


def _fields(facts: RunFacts) -> Iterator[tuple[str, str, str, str | None]]:
    """Name, label, value as used, and value as the user gave it (None: not given)."""
    train, result, plan = facts.job.train, facts.result, facts.plan
    data, objective = facts.job.data, facts.job.objective
    undecided = facts.stored.model is None and facts.recommendation is None

    def used(name: str, text: str) -> str:
        return _OF_RECIPE if undecided and _given(facts, name) is None else text

    yield "model", "model", _model(facts), None
    yield "data.uri", "data", data.uri + (f", target {data.target}" if data.target else ""), None
    yield "train.optimizer", "optimizer", used("optimizer", _optimizer(facts.job)), None
    if (rate := _learning_rate(facts)) is not None:
        yield "train.learning_rate", "learning rate", plain(rate), _given(facts, "learning_rate")
    yield (
        "train.schedule",
        "schedule",
        used("schedule", _schedule(facts.job)),
        _given(facts, "schedule"),
    )
    yield "train.epochs", "epochs", used("epochs", _epochs(facts)), _given(facts, "epochs")
    if plan is not None:
        batch = f"{plan.global_batch_size:,}"
        if plan.accumulation > 1:
            batch += f" in {plan.accumulation} micro-batches"
        yield "train.global_batch_size", "global batch", batch, _given(facts, "global_batch_size")
        words = plan.layout_in_words or str(plan.strategy.get("name", "data-parallel"))
        yield "train.layout", "layout", words, _given(facts, "layout")
    yield "train.precision", "precision", train.precision, None
    if result is not None:
        yield "train.backend", "library", result.backend, _given(facts, "backend")
    yield "train.seed", "seed", str(train.seed), None
    limits = [f"least {objective.minimize}"]
    if objective.deadline is not None:
        limits.append(f"deadline {seconds(objective.deadline)}")
    if objective.budget is not None:
        limits.append(f"budget {plain(objective.budget)}")
    limits.append(f"confidence {objective.confidence:g}")
    yield "objective", "objective", ", ".join(limits), None


def _given(facts: RunFacts, name: str) -> str | None:
    """The field of `train` as the user gave it; None: not given."""
    if not any(f"{field}.".startswith(f"train.{name}.") for field in facts.stored.given):
        return None
    value = getattr(facts.stored.train, name)
    if isinstance(value, str):
        return value
    return plain(value) if isinstance(value, int | float) else str(value.name)


def _learning_rate(facts: RunFacts) -> float | None:
    if facts.result is not None:
        return facts.result.learning_rate
    return facts.search.learning_rate if facts.search is not None else None


def _model(facts: RunFacts) -> str:
    model, found = facts.stored.model, facts.recommendation
    if model is None:
        return f"{found.chosen} (recommended)" if found is not None and found.chosen else "none yet"
    config = ", ".join(f"{name} {value}" for name, value in model.config.items())
    return model.source.rpartition("/")[2] + (f" ({config})" if config else "")


def _optimizer(job: Job) -> str:
    optimizer = job.train.optimizer
    decay = f", weight decay {optimizer.weight_decay:g}" if optimizer.weight_decay else ""
    return f"{optimizer.name}{decay}"


def _schedule(job: Job) -> str:
    warm_up = f", warm-up {job.train.warm_up:.0%}" if job.train.warm_up else ""
    return f"{job.train.schedule}{warm_up}"


def _epochs(facts: RunFacts) -> str:
    """As trained; of a training that stopped early, also how many there could have been."""
    most, result = facts.job.train.epochs, facts.result
    if result is None or result.epochs == most:
        return f"{most:,}"
    return f"{result.epochs:,} of {most:,}"
