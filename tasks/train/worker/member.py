"""What a rank's process does: it loads, and then takes part in one worker group after another. `entry` starts it.

It loads its libraries, the data and the model once. A spare one waits, loaded, until it is given the device of a process that
was lost.
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

from trainwright.estimator.devices import number_of, threads_of
from trainwright.estimator.memory.freed_memory import map_blocks
from trainwright.tasks.data import dataset as data
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.runs.artefacts import PlannedDevice
from trainwright.tasks.settings import Settings
from trainwright.tasks.train.channel import Channel, RankChannel
from trainwright.tasks.train.cpu_share import join_cgroup
from trainwright.tasks.train.exchange.collective import SUM_S, PeersLost
from trainwright.tasks.train.exchange.peers import Peers
from trainwright.tasks.train.launcher.rank_process import SPARE
from trainwright.tasks.train.launcher.watchdog import stall_s
from trainwright.tasks.train.rank.rank import OutOfMemory, Rank
from trainwright.tasks.train.record.metrics import warm_up
from trainwright.tasks.train.request import Order
from trainwright.tasks.train.worker.loop import Training
from trainwright.tasks.train.worker.low_priority import standing_back
from trainwright.tasks.train.worker.lr_ramp import begin_search, search
from trainwright.tasks.train.worker.torchrun import AloneChannel, is_launcher
from trainwright.tasks.train.worker_group import WorkerGroup


def main(order_path: Path, place: str) -> int:
    """Do what the order says; every failure is said to the launcher in one line."""
    faulthandler.enable()
    map_blocks()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to decide on
    alone = AloneChannel() if is_launcher() else None
    channel: Channel = alone or RankChannel()
    training = None
    try:
        order = Order.read(order_path, Settings.from_environment())
        if alone is not None:
            order = alone.begin(order)
        dataset = standing_back(_load, order) if place == SPARE else _load(order)
        peers = Peers(
            order.backend, SUM_S if alone is None else stall_s(order.request, _planned(order))
        )
        channel.attend(peers)
        if place == SPARE:
            channel.send("spare")
            number = int(channel.receive("device")["number"])
        else:
            number = int(place)
        planned = order.request.plan.devices[number]
        torch.set_num_threads(threads_of(planned.cores))
        if (group := order.cgroups[number]) is not None:
            join_cgroup(Path(group))
        rank = Rank(order.request, dataset, peers, _device(planned), number)
        rank.stop_on(signal.SIGTERM)
        channel.attend(peers, rank)
        training = Training(rank, channel, order)
        _take_part(training, peers, channel, order)
    except TrainwrightError as error:
        if alone is None or error.__cause__ is not None:  # of use in the rank's log
            traceback.print_exc()
        channel.send("error", error=error.document(), step=training and training.finished)
        return 1
    except Exception as error:  # noqa: BLE001 - a boundary: logged whole, and told to the launcher
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())
        document = {"kind": "training_failed", "message": message}
        channel.send("error", error=document, step=training and training.finished)
        return 1
    finally:
        if alone is not None:
            alone.close()
    return 0


def _planned(order: Order) -> list[int]:
    return [device.batch_size for device in order.request.plan.devices]


def _load(order: Order) -> data.Dataset:
    """The data, and the libraries that a step would wait for."""
    if order.backend == "horovod":
        importlib.import_module("horovod.torch")
    if order.mode == "train":  # what the first checkpoint would wait for
        warm_up()
        for name in ("safetensors.torch", "torch.utils.tensorboard"):
            importlib.import_module(name)
    return data.load(order.request.local_data)


def _take_part(training: Training, peers: Peers, channel: Channel, order: Order) -> None:
    """Take part in one worker group after another, until the launcher ends the process."""
    rank, says = training.rank, dict[str, Any]()
    while True:
        channel.send("free", step=training.finished, **says)
        message = channel.receive("join", "exit")
        if message.pop("kind") == "exit":
            return
        group, says = WorkerGroup.model_validate(message), {}
        rank.leave_asked = lambda generation=group.generation: channel.leave_asked == generation  # type: ignore[misc]
        try:
            peers.join(group, rank.number)
            channel.send("joined", generation=group.generation)
            if order.mode == "train":
                done = training.take_part(group)
            else:
                begin_search(rank, group)
                done = search(rank, channel, order.learning_rates, order.trial_steps)
            if done is not None:
                channel.send("done", **done)
        except Exception as error:
            traceback.print_exc()
            if isinstance(error, OutOfMemory):
                says = {
                    "no_memory_for": error.details["batch_size"],
                    "fits": rank.fits,
                    "memory_bytes": rank.memory_bytes(),
                }
            elif (lost := _lost_others(error)) is not None:
                says = {"lost": str(lost)}
            else:
                raise
            rank.abandon_step()
            if "no_memory_for" in says:
                gc.collect()  # what the step that failed still holds
        peers.leave()


def _lost_others(error: BaseException | None) -> PeersLost | None:
    """What an error comes of, where that is another rank that is gone; a backward pass may have wrapped it."""
    while error is not None and not isinstance(error, PeersLost):
        error = error.__cause__
    return error


def _device(planned: PlannedDevice) -> torch.device:
    """Where the rank computes. Raises BadInput for a GPU that this machine does not have."""
    if planned.type in ("cpu", "emulated"):
        return torch.device("cpu")
    every = [
        torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())
    ]
    number = number_of(planned.type, planned.index, [(one.name, one.total_memory) for one in every])
    if number is None:
        there = ", ".join(one.name for one in every) or "none"
        raise BadInput(
            f"{planned.id}: this machine has no such GPU that torch can use; it has {there}"
        )
    return torch.device("cuda", number)
