"""Step `train`: trains on the leased devices, from the newest checkpoint if one exists."""

from __future__ import annotations

import threading
from typing import Any

from trainwright.tasks.allocate.acquire import Claim, on_devices
from trainwright.tasks.allocate.replan.next_layout import StagePlanner, layout_planner
from trainwright.tasks.allocate.step import replanner_of
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.spec.metric_names import shown_metrics
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.train.request import TrainRequest
from trainwright.tasks.units import metric


def work(context: RunContext) -> Reference:
    """Train the run, unless it is trained already."""
    from trainwright.tasks.train.launcher.launch import train
    from trainwright.tasks.train.record.events import recording

    run, replay = context.run, context.replay
    result = run.find(Result)
    if result is None:
        events = replay.read(Result).split_events if replay is not None else None

        def on_claimed(halt: threading.Event, claim: Claim) -> Result:
            request = request_of(context).model_copy(update={"replay_events": events})
            found = run.find(Estimate)
            planners: dict[str, Any] = {}
            if found is not None:
                request = request.model_copy(update={"layers": found.layers})
                what = request.job, load_pool(request.job.pool), found, run.data()
                planners["layout_planner"] = layout_planner(*what)
                planners["stage_planner"] = StagePlanner(*what)
            return train(request, stop=halt, still_mine=claim, token=claim.token, **planners)

        with recording(run.work_folder()):  # includes the time between launches, to show the cause
            result = on_devices(context, on_claimed, "training", again=replanner_of(context))
        run.write(result)
    return {
        "artefact": Result.FILE,
        "state": result.state,
        "metrics": result.metrics,
        "model_of": result.model_in_words,
        "devices": {device.id: device.batch_size for device in result.devices},
        "target_reached": result.target_reached,
        "duration_s": result.measured.duration_s,
    }


def summary(reference: Reference) -> str:
    """The metrics, and whose: `accuracy 0.9722, loss 0.1034; model of epoch 8 of 20`."""
    shown = shown_metrics(reference["metrics"])
    metrics = ", ".join(f"{name} {metric(value)}" for name, value in shown.items())
    model_of = reference.get("model_of")
    return f"{metrics}; model of {model_of}" if model_of else metrics


def request_of(context: RunContext) -> TrainRequest:
    """This run's request to the launcher."""
    from trainwright.tasks.data.sources import localized

    run = context.run
    job, plan, search = run.job(), run.read(Plan), run.find(LearningRateSearch)
    here = any(device.local for device in plan.devices)  # other hosts get the data themselves
    return TrainRequest(
        job=job,
        data=localized(job.data, context.settings) if here else None,
        plan=plan,
        learning_rate=search.learning_rate if search else 0.0,
        schema=run.data(),
        source_folder=str(run.source_folder()),
        entry=run.model().entry,
        run_uri=run.uri,
        work_folder=str(run.work_folder()),
        resume=True,
        settings=context.settings,
    )
