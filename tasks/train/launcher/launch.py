"""The two things that ranks are started for: a training, and the ramp of the learning rate. Loads no torch."""

from __future__ import annotations

import importlib.util
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from trainwright.tasks import progress
from trainwright.tasks.allocate.strategies import DATA_PARALLEL
from trainwright.tasks.data.sources import content_sha256, require_content
from trainwright.tasks.errors import (
    BadInput,
    Interrupted,
    RunHeld,
    ServiceUnreachable,
    TrainwrightError,
)
from trainwright.tasks.runs.artefacts import Result
from trainwright.tasks.spec.job import CheckpointPolicy
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import ObjectStore
from trainwright.tasks.train.checkpoint import fence, files, shared_memory
from trainwright.tasks.train.checkpoint.fence import Fence
from trainwright.tasks.train.checkpoint.spill import recover
from trainwright.tasks.train.launcher.launcher import Launcher
from trainwright.tasks.train.launcher.result import result_of
from trainwright.tasks.train.record import events
from trainwright.tasks.train.record.journal import FOLDER as JOURNAL
from trainwright.tasks.train.record.metrics import drop_from
from trainwright.tasks.train.request import Order, RampPoint, Searched, TrainRequest

RESUME = "resume"
LOGS_PATIENCE_S = 10.0
"""for logs and events, where the store was away at the end"""


def train(
    request: TrainRequest,
    *,
    stop: threading.Event | None = None,
    still_mine: Callable[[], bool] | None = None,
    token: int | None = None,
) -> Result:
    """Train by a plan, from the newest checkpoint where `resume` is set and there is one.

    `stop` ends it after the step at hand, with a checkpoint; `still_mine` is asked at the start, every second and before
    each write of a checkpoint; `token` is the lease's, and only the latest holder's checkpoints count. Raises TrainingFailed
    naming the rank, Interrupted, RunHeld where the devices or the run are no longer ours, BadInput where a
    host's software or data is not as here or the model does not fit the data, ServiceUnreachable where a host can't be reached or
    the store is away at the start or the end.
    """
    _check_plan(request)
    store, work = request.store(), Path(request.work_folder)
    folder = work / RESUME
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(work / JOURNAL, ignore_errors=True)
    if still_mine is not None and not still_mine():
        raise RunHeld(
            "the lease on the devices was lost before training began; nothing was changed"
        )
    if request.resume:
        _bring_what_is_here(store, work, request.job.train.checkpoint)
    right = fence.claim(store, token)
    state = files.fetch_latest(store, folder) if request.resume else None
    if state is None:
        shutil.rmtree(work / "events", ignore_errors=True)
        shutil.rmtree(work / "spill", ignore_errors=True)
    elif (size := files.initial_batch(state)) != request.plan.global_batch_size:
        raise BadInput(
            f"plan: a global batch of {request.plan.global_batch_size}; the run's checkpoint at step {state.step} was made "
            f"with {size}; start a run anew"
        )
    right.forget(after=state.step if state is not None else -1)
    drop_from(store, state.step if state is not None else 0)
    shared_memory.prepare(work)
    order = Order(
        request=request,
        mode="train",
        backend=choose_backend(request.job.train.backend),
        started_at_s=time.time(),
        earlier_s=state.duration_s if state is not None else 0.0,
        claim=right.owner,
        lease_token=token,
        keeps=True,
    )
    found = str(folder) if state is not None else None
    events.fetch(store, work)
    try:
        with (
            events.recording(work),
            Launcher(
                order,
                stop,
                still_mine,
                lambda: _restore(right, work, request.job.train.checkpoint),
                checkpoint=found,
                committed=state.step if state else 0,
            ) as launcher,
        ):
            if state is not None:
                devices = ", ".join(device.id for device in request.plan.devices)
                message = f"training goes on from the checkpoint of step {state.step}, on {devices}"
                progress.emit("notice", message=message)
            done = launcher.watch()
    except RunHeld:
        shared_memory.forget(work, right.owner)
        raise  # the run folder is another's by now
    except BaseException as error:
        try:
            if isinstance(error, ServiceUnreachable):  # what is here comes with the next start
                shared_memory.drop_empty(work)
                store = request.store(patience_s=LOGS_PATIENCE_S)  # ranks have waited for it
            else:
                _bring_what_is_here(store, work, request.job.train.checkpoint)
            _keep_files(store, work)
        except (OSError, TrainwrightError) as why:
            progress.emit(
                "notice", message=f"logs, events or the last checkpoint could not be kept: {why}"
            )
        raise
    shared_memory.forget(work, right.owner)
    _keep_files(store, work)
    first = next(said for said in done.values() if "step" in said)
    if first["stopped"]:
        raise Interrupted(
            f"stopped after step {first['step']}; its checkpoint is kept", step=first["step"]
        )
    return result_of(order, store, done, launcher.shares, state.step if state is not None else None)


def _bring_what_is_here(store: ObjectStore, work: Path, policy: CheckpointPolicy) -> None:
    """What ranks that are gone left on this machine goes into the store, and is said."""
    saved = recover(store, work, policy)
    if (step := shared_memory.bring(store, work, policy)) is not None:
        saved.append(step)
    if saved:
        progress.emit(
            "notice",
            message=f"checkpoints kept on this machine arrived in the store: steps {saved}",
        )


def _restore(right: Fence, work: Path, policy: CheckpointPolicy) -> tuple[str | None, int]:
    """After all ranks were lost: the newest checkpoint, and nothing recorded of what is done again."""
    _bring_what_is_here(right.store, work, policy)
    shared_memory.prepare(work)
    folder = work / RESUME
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(work / JOURNAL, ignore_errors=True)
    state = files.fetch_latest(right.store, folder)
    right.forget(after=state.step if state is not None else -1)
    drop_from(right.store, state.step if state is not None else 0)
    where = (
        f"goes on from the checkpoint of step {state.step}" if state is not None else "begins anew"
    )
    progress.emit("notice", message=f"no rank that had the training's state is left: it {where}")
    return (str(folder), state.step) if state is not None else (None, 0)


def ramp(
    request: TrainRequest, learning_rates: list[float], *, stop: threading.Event | None = None
) -> list[RampPoint]:
    """Train with a learning rate that rises from step to step, on the real model, data and split; nothing is kept.

    One point a step, on the joint global batch; fewer than asked for where the loss runs away. Raises as `train` does.
    """
    return search(request, learning_rates, 0, stop=stop).points


def search(
    request: TrainRequest,
    learning_rates: list[float],
    trial_steps: int,
    *,
    stop: threading.Event | None = None,
) -> Searched:
    """A ramp and, from the same start, trials of so many steps at rates below the one where it ran away; nothing is kept.

    Which rates are tried: `tasks.lr_trials`. Raises as `train` does.
    """
    _check_plan(request)
    order = Order(
        request=request,
        mode="ramp",
        backend=choose_backend(request.job.train.backend),
        learning_rates=learning_rates,
        trial_steps=trial_steps,
        started_at_s=time.time(),
    )
    stop = stop or threading.Event()
    with Launcher(order, stop, None) as launcher:
        done = launcher.watch()
    if stop.is_set():
        raise Interrupted("stopped while the learning rate was searched")
    said = [one for one in done.values() if "points" in one]  # a device without memory says nothing
    return Searched.model_validate({**said[0], "states": [one["state"] for one in said]})


def choose_backend(wanted: Literal["auto", "horovod", "torch"]) -> Literal["horovod", "torch"]:
    """The collectives' library: what the job names, or Horovod where it is installed. Raises BadInput where it is not."""
    has_horovod = importlib.util.find_spec("horovod") is not None
    if wanted == "horovod" and not has_horovod:
        raise BadInput(
            "train.backend: got 'horovod', which is not installed here; `python -m trainwright.infra.horovod` builds it, "
            "and torch works without"
        )
    return "horovod" if has_horovod and wanted != "torch" else "torch"


def _check_plan(request: TrainRequest) -> None:
    if not request.plan.devices:
        raise BadInput("plan: has no device; allowed: one or more")
    if (name := request.plan.strategy.get("name", DATA_PARALLEL)) != DATA_PARALLEL:
        raise BadInput(
            f"plan.strategy: got {name!r}; allowed where trainwright trains: {DATA_PARALLEL}"
        )
    if any(device.local for device in request.plan.devices):  # hosts look for themselves
        require_content(
            request.job.data, content_sha256(request.local_data), request.schema_.sha256
        )


def _keep_files(store: ObjectStore, work: Path) -> None:
    """Put logs and TensorBoard events into the run folder."""
    if isinstance(store, FolderStore) and store.root == work:
        return
    for path in sorted(
        [*work.glob("logs/*.log"), *work.glob("logs/*.jsonl"), *work.glob("events/*")]
    ):
        store.put_file(path.relative_to(work).as_posix(), path)
