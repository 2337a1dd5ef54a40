"""A rank as a process: `python -m trainwright.tasks.train.worker ORDER.json RANK`, started by `ranks`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

import torch  # noqa: TID253 - this is a process of its own

from trainwright.tasks import data
from trainwright.tasks.artefacts import PlannedDevice
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.train.channel import RankChannel
from trainwright.tasks.train.collective import Collective, HorovodCollective, TorchCollective
from trainwright.tasks.train.cpu_share import join_cgroup
from trainwright.tasks.train.loop import Training
from trainwright.tasks.train.ramp import search
from trainwright.tasks.train.rank import Rank
from trainwright.tasks.train.request import Order


def main(order_path: Path, number: int) -> int:
    """Do what the order says; every failure is said to the launcher in one line."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to decide on
    channel = RankChannel()
    try:
        order = Order.model_validate_json(order_path.read_text())
        planned = order.request.plan.devices[number]
        torch.set_num_threads(max(1, int(planned.cores or 1)))
        device, dataset = _device(planned), data.load(order.request.job.data)
        collective = _join(order, number, order_path)
        channel.ask("ready")
        if (group := order.cgroups[number]) is not None:
            join_cgroup(Path(group))
        rank = Rank(order.request, dataset, collective, device)
        rank.stop_on(signal.SIGTERM)
        if order.mode == "train":
            result = Training(rank, channel, order).run()
        else:
            result = search(rank, channel, order.learning_rates, order.trial_steps)
        channel.send("done", **result)
        collective.shutdown()
    except TrainwrightError as error:
        traceback.print_exc()
        channel.send("error", error=error.document())
        return 1
    except Exception as error:  # noqa: BLE001 - a boundary: logged whole, and told to the launcher
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())
        channel.send("error", error={"kind": "training_failed", "message": message})
        return 1
    return 0


def _join(order: Order, number: int, order_path: Path) -> Collective:
    if order.backend == "horovod":
        return HorovodCollective()
    return TorchCollective(number, len(order.request.plan.devices), order_path.with_name("meeting"))


def _device(planned: PlannedDevice) -> torch.device:
    """Where the rank computes. Raises BadInput for a GPU that this machine does not have."""
    if planned.type in ("cpu", "emulated"):
        return torch.device("cpu")
    family = planned.type.split("-")[1]
    if torch.cuda.is_available() and planned.index < torch.cuda.device_count():
        name = torch.cuda.get_device_name(planned.index)
        if family in name.lower().replace("rtx ", "rtx").replace("-", " ").split():
            return torch.device("cuda", planned.index)
        raise BadInput(f"{planned.id}: the pool says {planned.type}; this machine has {name}")
    raise BadInput(f"{planned.id}: this machine has no such GPU that torch can use")


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Horovod's threads may hang at the interpreter's exit after a peer has gone
