"""The processes of a training: one for each device, started, replaced and ended; and a spare one. Loads no torch.

Which of them form a world is `membership`; what they say, `ranks`.
"""

from __future__ import annotations

import selectors
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from trainwright.estimator.devices import threads_of
from trainwright.tasks.train import cpu_share
from trainwright.tasks.train.cpu_share import CpuShare
from trainwright.tasks.train.exchange.rendezvous import Rendezvous
from trainwright.tasks.train.hosts.hosts import LOOPBACK_WAY, Hosts, machine
from trainwright.tasks.train.hosts.remote_rank import RemoteShare
from trainwright.tasks.train.launcher.rank_process import Worker, own_environment, start_worker
from trainwright.tasks.train.request import Order

SPARE_AFTER_S = 3.0
"""A spare process is started when a training lasts longer than this."""
_MOST_SPARES = 10


class RankProcesses:
    """The process of each device of a plan, by number, on this machine and on others."""

    def __init__(self, order: Order, heed: Callable[[], None]) -> None:
        """`heed` is called while hosts are waited for, and raises where that is to end."""
        self._order, self._heed = order, heed
        self._work = Path(order.request.work_folder)
        self._restarts = order.request.job.train.faults.restarts
        self.devices = order.request.plan.devices
        self.machines = [machine(device) for device in self.devices]
        self.rendezvous = Rendezvous(order.backend, self._work)
        self.shares: list[CpuShare | RemoteShare] = []
        self.by_number: dict[int, Worker] = {}
        self.spare: Worker | None = None
        self._spares = 0
        self._hosts: Hosts | None = None
        self._way = LOOPBACK_WAY
        self._selector = selectors.DefaultSelector()

    def start(self) -> None:
        """Reach the hosts, set up the shares of the CPU, and start a process for each device."""
        cpu_share.remove_stale_cgroups()
        (self._work / "logs").mkdir(parents=True, exist_ok=True)
        if not all(device.local for device in self.devices):
            self._hosts = hosts = Hosts(self._order, self._work, self._heed)
            self._way = hosts.way
            self.rendezvous = Rendezvous(
                self._order.backend, self._work, hosts.address, hosts.peers
            )
        for rank, device in enumerate(self.devices):
            there = self._hosts if not device.local else None
            self.shares.append(there.share(rank) if there else CpuShare(str(rank), device.cores))
        groups = [str(share.group) if share.group else None for share in self.shares]
        order = self._order.model_copy(update={"cgroups": groups})
        self._order_file.write_text(order.model_dump_json(by_alias=True))
        if self._hosts is not None:
            self._hosts.give_order(order)
        for number in range(len(self.devices)):
            self.by_number[number] = self._start(number)

    @property
    def _order_file(self) -> Path:
        return self._work / "order.json"

    def _start(self, number: int | None) -> Worker:
        """The one place where a process is started: a device's, here or on its host, or a spare one."""
        name = f"rank-{number}" if number is not None else "spare"
        threads = threads_of(self.devices[number].cores) if number is not None else 1
        slot = number if number is not None else len(self.devices) + self._spares
        log = self._work / "logs" / f"{name}.log"
        if self._hosts is not None and number is not None and not self.devices[number].local:
            worker = Worker(
                number, *self._hosts.start(number, own_environment(slot, threads), log), log
            )
        else:
            worker = start_worker(
                self._order_file, number, slot=slot, threads=threads, log=log, way=self._way
            )
        self._selector.register(worker.channel.socket, selectors.EVENT_READ, worker)
        return worker

    def speaking(self, timeout_s: float) -> list[Worker]:
        """Those that have said something, or ended, within the time."""
        return [key.data for key, _ in self._selector.select(timeout=timeout_s)]

    def knows(self, worker: Worker) -> bool:
        """Whether it is a device's process, or the spare one."""
        return worker is self.spare or worker in self.by_number.values()

    def hang_up(self, worker: Worker) -> None:
        """Its end of the channel has closed."""
        self._selector.unregister(worker.channel.socket)
        worker.channel.close()

    def lost(self, number: int) -> None:
        """A device has no process any more."""
        self.shares[number].let_go()
        del self.by_number[number]

    def replace_lost(self, may_restart: Callable[[int], bool], *, lasts: bool) -> None:
        """A process for each device without one that may have it; a spare one where the training `lasts`."""
        if self._hosts is not None:
            for number, share in self._hosts.returned().items():
                self.shares[number] = share
        for number in range(len(self.devices)):
            if number not in self.by_number and may_restart(number) and not self._is_gone(number):
                self.by_number[number] = self._appointed(number) or self._start(number)
        if not any(device.local for device in self.devices):
            return
        loading = any(
            worker.state == "starting" for worker in self.by_number.values()
        )  # who is needed loads first
        if (
            self.spare is None
            and lasts
            and not loading
            and self._spares < _MOST_SPARES
            and self._restarts > 0
        ):
            self._spares += 1
            self.spare = self._start(None)

    def _is_gone(self, number: int) -> bool:
        """Whether a device's host is lost."""
        return self._hosts is not None and self._hosts.is_gone(number)

    def may_return(self, may_restart: Callable[[int], bool]) -> bool:
        """Whether a device is waited for whose host is lost, and tried again."""
        return any(
            may_restart(number) and self._is_gone(number) for number in range(len(self.devices))
        )

    def _appointed(self, number: int) -> Worker | None:
        """The spare process, now this device's; it is on this machine."""
        worker = self.spare
        if not self.devices[number].local or worker is None or worker.state != "loaded":
            return (
                None  # one that still loads, while the CPU is busy, would take longer than another
            )
        self.spare = None
        worker.number, worker.state = number, "starting"
        worker.channel.send("device", number=number)
        self._spares -= 1
        return worker

    def close(self, grace_s: float) -> None:
        """End all: who has said its last words within the grace, the others at once."""
        deadline = time.monotonic() + grace_s
        for share in self.shares:
            share.let_go()
        workers = [*self.by_number.values(), *([self.spare] if self.spare is not None else [])]
        for worker in workers:
            if worker.done is not None:
                worker.channel.send("exit")
            else:
                worker.kill()
        for worker in workers:
            try:
                worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
        for worker in workers:
            worker.process.wait()
            worker.channel.close()
        for share in self.shares:
            share.remove()
        self._selector.close()
        if self._hosts is not None:
            self._hosts.close()
        self.rendezvous.close()
