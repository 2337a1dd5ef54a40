"""An order as it applies on a host: paths there, and devices as processes there see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainwright.estimator.devices import HOST_MEMORY_TYPES
from trainwright.tasks.errors import BadInput
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


def require_gpus(devices: Sequence[PlannedDevice], address: str, visible: str) -> None:
    """Check that a cluster gave a host the GPUs that the plan uses there. Raises BadInput.

    `visible`: its CUDA_VISIBLE_DEVICES; if that is empty, the cluster does not say what it gave.
    """
    used = [
        one
        for one in devices
        if one.address == address and one.engine != "ssh" and one.type not in HOST_MEMORY_TYPES
    ]
    given = [one for one in visible.split(",") if one not in ("", "NoDevFiles")]
    if visible and len(given) < len(used):
        raise BadInput(
            f"host {address}: {used[0].engine} gave {len(given)} GPU(s) "
            f"(CUDA_VISIBLE_DEVICES={visible}), and the plan uses {len(used)}; allowed: a kind of "
            "GPU in the pool file (`gres`) that the cluster knows as GPUs"
        )
