"""The work of a rank's process: it loads, then takes part in one worker group after another.

It loads its libraries, the data and the model once. A spare process loads only the libraries and
the model's code; it loads the data when it replaces a lost process, because most spares are never
needed and a second copy of the data may not fit in memory. `entry` starts it.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import signal
import traceback
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.devices import number_of
from trainwright.estimator.memory.freed_memory import map_blocks
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.infra.cpu_share import join_cgroup
from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.data.model_reader import ModelReader
from trainwright.tasks.data.prepared import prepared
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.settings import Settings
from trainwright.tasks.train.channel import STOP_SIGNAL, Channel, RankChannel, under_torchrun
from trainwright.tasks.train.exchange.collective import SUM_S, PeersLost
from trainwright.tasks.train.exchange.peers import Peers
from trainwright.tasks.train.launcher.rank_process import SPARE
from trainwright.tasks.train.membership.watchdog import stall_timeout_s
from trainwright.tasks.train.out_of_memory import OutOfMemory
from trainwright.tasks.train.rank.rank import Rank
from trainwright.tasks.train.request import Order
from trainwright.tasks.train.worker.loop import Training
from trainwright.tasks.train.worker.low_priority import at_low_priority
from trainwright.tasks.train.worker.lr_ramp import begin_search, search
from trainwright.tasks.train.worker_group import WorkerGroup


def main(order_path: Path, place: str) -> int:
    """Carry out the order. Reports every failure to the launcher in one line."""
    faulthandler.enable()
    map_blocks()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C does
    alone = None
    if not under_torchrun():
        # A cluster sends SIGTERM to all processes of a host that it takes back. The agent reports
        # that, and the launcher decides.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        # Only here: it loads the ledger's database.
        from trainwright.tasks.train.worker.torchrun import TorchrunChannel

        alone = TorchrunChannel()
    channel: Channel = alone or RankChannel()
    training = None
    try:
        order = Order.read(order_path, Settings.from_environment() if alone else Settings())
        if alone is not None:
            order = alone.begin(order)
        model = None
        if place == SPARE:
            model = at_low_priority(_load_code, order)
        else:
            _import_libraries(order)
        peers = Peers(order.backend, SUM_S if alone is None else _stall_timeout_s(order))
        channel.attend(peers)
        number = _await_device(channel) if place == SPARE else int(place)
        rank = _load_rank(order, number, model, peers)
        rank.stop_on(signal.SIGTERM if alone is not None else STOP_SIGNAL)
        channel.attend(peers, rank)
        training = Training(rank, channel, order)
        _take_part(training, peers, channel, order)
    except TrainwrightError as error:
        if alone is None or error.__cause__ is not None:  # the cause helps in the rank's log
            traceback.print_exc()
        channel.send("error", error=error.document(), step=training and training.finished)
        return 1
    except Exception as error:  # noqa: BLE001 - a boundary: logged and reported to the launcher
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())
        document = {"kind": "training_failed", "message": message}
        channel.send("error", error=document, step=training and training.finished)
        return 1
    finally:
        if alone is not None:
            alone.close()
    return 0


def _stall_timeout_s(order: Order) -> float:
    """How long a sum may take if no launcher watches the ranks."""
    devices, split = order.request.plan.devices, order.request.plan.shares
    return stall_timeout_s(order.request.job.train.faults.stall_timeout, devices, split)


def _import_libraries(order: Order) -> None:
    """Import libraries now that the first step or checkpoint would otherwise wait for."""
    if order.backend == "horovod":
        importlib.import_module("horovod.torch")
    if order.mode == "train":
        for name in ("safetensors.torch", "torch.utils.tensorboard"):
            importlib.import_module(name)


def _load_code(order: Order) -> ModelDefinition:
    """Import everything a rank needs that does not depend on its device."""
    _import_libraries(order)
    return model_source.load(Path(order.request.source_folder), order.request.entry)


def _await_device(channel: Channel) -> int:
    """Wait until this spare process is assigned a device. Returns the device's number."""
    channel.send("loaded")
    return int(channel.receive("device")["number"])


def _load_rank(order: Order, number: int, model: ModelDefinition | None, peers: Peers) -> Rank:
    """Load the data, then build the model with the rank's CPU share."""
    request = order.request
    dataset: Dataset | ModelReader
    if request.job.data.reader == "model":
        model = model or model_source.load(Path(request.source_folder), request.entry)
        config = request.job.model.config if request.job.model else {}
        dataset = ModelReader(model, request.local_data, config, request.schema_)
    else:
        dataset = prepared(request.local_data, request.settings.home, request.job.train.seed)
    planned = request.plan.devices[number]
    torch.set_num_threads(planned.threads)
    if (cgroup := order.cgroups[number]) is not None:
        join_cgroup(Path(cgroup))
    return Rank(request, dataset, peers, _device(planned), number, model)


def _take_part(training: Training, peers: Peers, channel: Channel, order: Order) -> None:
    """Take part in one worker group after another, until the launcher ends the process."""
    rank, report = training.rank, dict[str, Any]()
    while True:
        channel.send("ready", step=training.finished, **report)
        message = channel.receive("join", "exit")
        if message.pop("kind") == "exit":
            return
        group, report = WorkerGroup.model_validate(message), {}
        rank.leave_asked = lambda generation=group.generation: channel.leave_asked == generation  # type: ignore[misc]
        try:
            peers.join(
                group,
                rank.number,
                lambda generation=group.generation: channel.abort_asked == generation,  # type: ignore[misc]
            )
            channel.send("joined")
            if order.mode == "train":
                done = training.take_part(group)
            else:
                begin_search(rank, group)
                done = search(rank, channel, order.learning_rates, order.trial_steps)
            if done is not None:
                channel.send("done", **done)
        except Exception as error:
            traceback.print_exc()
            if not (report := _why_out(error, rank)):
                raise
            rank.abandon_step()
            if "out_of_memory" in report:
                gc.collect()  # memory that the failed step still holds
        peers.leave()


def _why_out(error: Exception, rank: Rank) -> dict[str, Any]:
    """Why the rank left its group; empty if the error would recur in another group."""
    if isinstance(error, OutOfMemory) and error.details.get("final"):
        return {}
    if isinstance(error, OutOfMemory):
        of_all = {"layer": error.details["layer"]} if "layer" in error.details else {}
        shortage = {"batch_size": error.details.get("batch_size", 0), "fits": rank.fits, **of_all}
        return {"out_of_memory": {**shortage, "memory_bytes": rank.memory_bytes()}}
    # a backward pass may have wrapped the loss of a peer
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PeersLost):
        cause = cause.__cause__
    return {} if cause is None else {"sum_error": str(cause)}


def _device(planned: PlannedDevice) -> torch.device:
    """The rank's torch device. Raises BadInput for a GPU that this machine does not have."""
    if planned.type in ("cpu", "emulated"):
        return torch.device("cpu")
    every = [
        torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())
    ]
    number = number_of(planned.type, planned.index, [(one.name, one.total_memory) for one in every])
    if number is None:
        there = ", ".join(one.name for one in every) or "none"
        raise BadInput(f"{planned.id}: torch finds no such GPU on this machine; it finds {there}")
    return torch.device("cuda", number)
