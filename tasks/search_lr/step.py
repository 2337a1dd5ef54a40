"""Step `search_lr`: finds the learning rate with the real model and data on leased devices."""

from __future__ import annotations

from trainwright.tasks.allocate.acquire import on_devices
from trainwright.tasks.allocate.step import replanner_of
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.run import Run


def work(context: RunContext) -> Reference:
    """Search for the rate, or take it from the job or from the replayed run."""
    from trainwright.tasks.search_lr.learning_rate import search_learning_rate
    from trainwright.tasks.search_lr.plot import plot
    from trainwright.tasks.train.step import request_of

    run = context.run
    search = run.find(LearningRateSearch)
    if search is None:
        given = run.job().train.learning_rate
        if context.replay is not None:
            replayed = context.replay.read(LearningRateSearch)
            search = replayed.model_copy(update={"source": "replayed"})
        elif given != "auto":
            search = LearningRateSearch(
                learning_rate=given,
                interval=(given, given),
                source="given",
                reason="set in the job" if _is_set(run) else "of the recommended model's recipe",
            )
        else:
            search = on_devices(
                context,
                lambda halt, _: search_learning_rate(request_of(context), stop=halt),
                "the search for the learning rate",
                again=replanner_of(context),
            )
            run.objects.put("lr_search.html", plot(search).encode())
        run.write(search)
    return {
        "artefact": LearningRateSearch.FILE,
        "learning_rate": search.learning_rate,
        "interval": list(search.interval),
        "source": search.source,
    }


def _is_set(run: Run) -> bool:
    """Whether the rate of the job's is the user's own, not the recommended model's."""
    job = run.read(RunJob)
    return job.model is not None or "train.learning_rate" in job.given


def summary(reference: Reference) -> str:
    """One line, for example: learning rate 0.0123 (0.0041 to 0.037, searched)."""
    low, high = reference["interval"]
    between = f"{low:.2g} to {high:.2g}, " if low < high else ""
    return f"learning rate {reference['learning_rate']:.3g} ({between}{reference['source']})"
