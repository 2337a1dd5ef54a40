"""Runs a training or a learning-rate search with a launcher. Loads no torch."""

from __future__ import annotations

import importlib.util
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from trainwright.tasks import progress
from trainwright.tasks.allocate.layouts.permitted import require_trained
from trainwright.tasks.allocate.replan.next_layout import LayoutPlanner, StagePlanner
from trainwright.tasks.data.sources import content_sha256, require_content
from trainwright.tasks.errors import (
    BadInput,
    Interrupted,
    RunHeld,
    ServiceUnreachable,
    TrainwrightError,
)
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import ObjectStore
from trainwright.tasks.train.checkpoint import fence, files, staged
from trainwright.tasks.train.checkpoint.coordinator import Coordinator
from trainwright.tasks.train.checkpoint.uploader import Uploader, recover, rewind
from trainwright.tasks.train.hosts.container import in_images
from trainwright.tasks.train.launcher.launcher import Launcher
from trainwright.tasks.train.launcher.result import result_of
from trainwright.tasks.train.record import events
from trainwright.tasks.train.request import Order, RampPoint, Searched, TrainRequest

LOGS_PATIENCE_S = 10.0
"""How long to try to store logs and events if the store was unreachable at the end, and
checkpoints after a failure."""


def train(
    request: TrainRequest,
    *,
    stop: threading.Event | None = None,
    still_mine: Callable[[], bool] | None = None,
    token: int | None = None,
    layout_planner: LayoutPlanner | None = None,
    stage_planner: StagePlanner | None = None,
) -> Result:
    """Train by a plan, from the newest checkpoint if `resume` is set and one exists.

    `layout_planner` plans the layout for the devices that are left after a fault; None: the ranks
    divide the plan's among themselves. `stage_planner` plans cuts of pipelines by measured speeds;
    None: cuts stay. `stop` ends the training after the current step, with a
    checkpoint. `still_mine` is called at the start, every second, and before each upload of a
    checkpoint. `token` is the lease's fencing token: only checkpoints of the latest holder count.

    Raises TrainingFailed naming the rank; Interrupted; RunHeld if the lease on the devices or the
    run is lost; BadInput if a host's software or data differ from this machine's, or the model does
    not fit the data; ServiceUnreachable if a host is unreachable, or the store is at the start or
    the end.
    """
    _check_plan(request)
    store, work, stop = request.store(), Path(request.work_folder), stop or threading.Event()
    if still_mine is not None and not still_mine():
        raise RunHeld(
            "the lease on the devices was lost before training began; nothing was changed"
        )
    owner, state = _claim(request, store, work, token)
    order = Order(
        request=request,
        mode="train",
        backend=choose_backend(request.job.train.backend, in_images(request)),
        started_at_s=time.time(),
        earlier_s=state.duration_s if state is not None else 0.0,
        launch=owner,
    )
    events.fetch(store, work)
    staged.prepare(work)
    uploader = Uploader(
        request.store,
        staged.StagingArea(work, owner),
        request.job.train.checkpoint,
        stored=state.step if state is not None else 0,
        require_mine=lambda: _require_mine(still_mine),
        report=progress.emit,
    )
    try:
        with events.recording(work), uploader:
            done, shares = _train(
                order, uploader, state, stop, still_mine, token, (layout_planner, stage_planner)
            )
    except RunHeld:
        uploader.area.forget()
        raise  # another launch owns the run folder
    except BaseException as error:
        try:
            if isinstance(error, ServiceUnreachable):  # the full patience is already spent
                store = request.store(patience_s=LOGS_PATIENCE_S)
            _keep_files(store, work)
        except (OSError, TrainwrightError) as why:
            progress.emit(
                "notice", message=f"logs, events or the last checkpoint could not be stored: {why}"
            )
        raise
    _keep_files(store, work)
    first = next(said for said in done.values() if "step" in said)
    if first["stopped"]:
        raise Interrupted(
            f"stopped after step {first['step']}; its checkpoint is kept", step=first["step"]
        )
    return result_of(order, store, done, shares, state.step if state is not None else None)


def _claim(
    request: TrainRequest, store: ObjectStore, work: Path, token: int | None
) -> tuple[str, files.CheckpointState | None]:
    """Claim the run for this launch: the launch's name, and the newest checkpoint's state."""
    if request.resume and (saved := recover(store, work, request.job.train.checkpoint)):
        message = f"uploaded checkpoints staged on this machine: steps {saved}"
        progress.emit("notice", message=message)
    right = fence.claim(store, token)
    state = rewind(right, work, resume=request.resume)
    if state is None:
        shutil.rmtree(work / "events", ignore_errors=True)
    elif (size := files.initial_batch(state)) != request.plan.global_batch_size:
        raise BadInput(
            f"plan: a global batch of {request.plan.global_batch_size}; the run's checkpoint at "
            f"step {state.step} was made with {size}; start a new run"
        )
    return right.owner, state


def _train(
    order: Order,
    uploader: Uploader,
    state: files.CheckpointState | None,
    stop: threading.Event,
    still_mine: Callable[[], bool] | None,
    token: int | None,
    planners: tuple[LayoutPlanner | None, StagePlanner | None],
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Start the ranks and watch them to the end; their final reports and CPU shares.

    However it ends, staged checkpoints are uploaded, unless the store is unreachable or another
    launch owns the run.
    """
    request = order.request
    devices = [device.id for device in request.plan.devices]
    checkpoints = Coordinator(
        uploader,
        devices,
        request.job.train.checkpoint,
        token=token,
        stop=stop,
        patience_s=request.store_patience_s,
    )
    try:
        summed = state.summed if state is not None else []
        with Launcher(order, stop, still_mine, checkpoints, *planners, summed) as launcher:
            if state is not None:
                where = f"from the checkpoint of step {state.step}, on {', '.join(devices)}"
                if state.layout not in ("", request.layout.name):
                    where += f", in the layout {request.layout.name} instead of {state.layout}"
                progress.emit("notice", message=f"training continues {where}")
            done = launcher.watch()
        checkpoints.settle()
    except (RunHeld, ServiceUnreachable):
        raise
    except BaseException:
        try:
            uploader.settle(stop, LOGS_PATIENCE_S)
        except TrainwrightError as why:
            progress.emit(
                "notice", message=f"logs, events or the last checkpoint could not be stored: {why}"
            )
        raise
    finally:
        if uploader.has_all:
            uploader.area.forget()
    return done, launcher.shares


def _require_mine(still_mine: Callable[[], bool] | None) -> None:
    if still_mine is not None and not still_mine():
        raise RunHeld(
            "the lease on the devices was lost while training; the last checkpoint is kept"
        )


def ramp(
    request: TrainRequest, learning_rates: list[float], *, stop: threading.Event | None = None
) -> list[RampPoint]:
    """Train with a learning rate that rises from step to step; nothing is kept.

    One point per step of the global batch; fewer points than rates if the loss diverges. Model,
    data and split are the training's. Raises the same errors as `train`.
    """
    return search(request, learning_rates, 0, stop=stop).points


def search(
    request: TrainRequest,
    learning_rates: list[float],
    trial_steps: int,
    *,
    stop: threading.Event | None = None,
) -> Searched:
    """A ramp, then trials of `trial_steps` steps each at rates below the diverging one.

    All start from the same state, and nothing is kept. `worker.lr_trials` chooses the rates.
    Raises the same errors as `train`.
    """
    _check_plan(request)
    order = Order(
        request=request,
        mode="ramp",
        backend=choose_backend(request.job.train.backend, in_images(request)),
        learning_rates=learning_rates,
        trial_steps=trial_steps,
        started_at_s=time.time(),
    )
    stop = stop or threading.Event()
    with Launcher(order, stop, None) as launcher:
        done = launcher.watch()
    if stop.is_set():
        raise Interrupted("stopped during the learning-rate search")
    said = [one for one in done.values() if "points" in one]  # devices left out report none
    return Searched.model_validate({**said[0], "states": [one["state"] for one in said]})


def choose_backend(
    wanted: Literal["auto", "horovod", "torch"], in_image: bool = False
) -> Literal["horovod", "torch"]:
    """The library for collectives: the job's choice, else Horovod if it is installed.

    Not if ranks run in an image: those of `infra/images` have no Horovod. Raises BadInput if the
    job chooses Horovod and it is not installed.
    """
    has_horovod = importlib.util.find_spec("horovod") is not None
    if wanted == "horovod" and not has_horovod:
        raise BadInput(
            "train.backend: got 'horovod', which is not installed here; "
            "run `python -m trainwright.infra.horovod` to build it, or use 'torch'"
        )
    if wanted == "auto" and in_image:
        return "torch"
    return "horovod" if has_horovod and wanted != "torch" else "torch"


def _check_plan(request: TrainRequest) -> None:
    require_trained(request.plan)
    if any(device.local for device in request.plan.devices):  # other hosts check their own data
        require_content(
            request.job.data, content_sha256(request.local_data), request.schema_.sha256
        )


def _keep_files(store: ObjectStore, work: Path) -> None:
    """Store logs and TensorBoard events in the run folder."""
    if isinstance(store, FolderStore) and store.root == work:
        return
    for path in sorted(
        [*work.glob("logs/*.log"), *work.glob("logs/*.jsonl"), *work.glob("events/*")]
    ):
        store.put_file(path.relative_to(work).as_posix(), path)
