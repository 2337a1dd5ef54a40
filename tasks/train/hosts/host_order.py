"""An order as it applies on a host: paths there, and devices as processes there see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.train.hosts.session import Session
from trainwright.tasks.train.request import Order


def order_there(order: Order, session: Session, data: str) -> Order:
    """The order with the paths that apply on the host; `data` is the path of the data there."""
    request, work = order.request, session.work
    plan = request.plan.model_copy(
        update={"devices": numbered(request.plan.devices, session.address)}
    )
    return order.model_copy(
        update={
            "request": request.model_copy(
                update={
                    "plan": plan,
                    "data": request.job.data.model_copy(update={"uri": data}),
                    "source_folder": f"{work}/source",
                    "work_folder": work,
                    "run_uri": None,
                }
            ),
            "launch": None,
        }
    )


def numbered(devices: Sequence[PlannedDevice], address: str) -> list[PlannedDevice]:
    """The devices, those at an address numbered as the processes there see them.

    A process of Slurm or Kubernetes sees the GPUs of its own job only, not all of the node.
    """
    found, seen = [], Counter[str]()
    for device in devices:
        if device.engine != "ssh" and device.address == address:
            found.append(device.model_copy(update={"index": seen[device.type]}))
            seen[device.type] += 1
        else:
            found.append(device)
    return found
