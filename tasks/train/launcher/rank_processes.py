"""Starts and ends the processes of a launch: one per device, and a spare. Loads no torch.

`membership.state_machine` decides when to start them and what they do.
"""

from __future__ import annotations

import selectors
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from trainwright.infra import cpu_share
from trainwright.infra.cpu_share import CpuShare
from trainwright.tasks.train.exchange.rendezvous import Rendezvous
from trainwright.tasks.train.hosts.host_addresses import LOOPBACK_VARIABLES
from trainwright.tasks.train.hosts.hosts import Hosts, machine
from trainwright.tasks.train.hosts.remote_rank import LaterShare, RemoteShare
from trainwright.tasks.train.launcher.rank_process import (
    RankProcess,
    own_environment,
    start_process,
)
from trainwright.tasks.train.request import Order


class RankProcesses:
    """The processes of a plan's devices, by device number, on this machine and on others."""

    def __init__(self, order: Order, check: Callable[[], None]) -> None:
        """`check` is called while hosts are prepared, and raises to end that."""
        self._order, self._check = order, check
        self._work = Path(order.request.work_folder)
        self._devices = order.request.plan.devices
        self.machines = [machine(device) for device in self._devices]
        self.rendezvous = Rendezvous(order.backend, self._work)
        self.shares: list[CpuShare | RemoteShare | LaterShare] = []
        self.by_number: dict[int, RankProcess] = {}
        self.spare: RankProcess | None = None
        self._spares = 0
        self._hosts: Hosts | None = None
        self._unreachable: frozenset[int] = frozenset()
        self._interface = LOOPBACK_VARIABLES
        self._selector = selectors.DefaultSelector()

    def prepare(self) -> None:
        """Connect to the hosts, create the CPU shares, and write the ranks' order."""
        cpu_share.remove_stale_cgroups()
        (self._work / "logs").mkdir(parents=True, exist_ok=True)
        if not all(device.local for device in self._devices):
            self._hosts = hosts = Hosts(self._order, self._work, self._check)
            self._interface = hosts.own_interface
            self.rendezvous = Rendezvous(
                self._order.backend, self._work, hosts.address, hosts.peers
            )
        for rank, device in enumerate(self._devices):
            there = self._hosts if not device.local else None
            self.shares.append(there.share(rank) if there else CpuShare(str(rank), device.cores))
        groups = [str(share.group) if share.group else None for share in self.shares]
        order = self._order.model_copy(update={"cgroups": groups})
        self._order_file.write_text(order.model_dump_json(by_alias=True))
        if self._hosts is not None:
            self._hosts.give_order(order)

    @property
    def _order_file(self) -> Path:
        return self._work / "order.json"

    def start(self, number: int) -> None:
        """Start a device's process, here or on its host."""
        threads = self._devices[number].threads
        log = self._work / "logs" / f"rank-{number}.log"
        if self._hosts is not None and not self._devices[number].local:
            remote = self._hosts.start(number, own_environment(number, threads), log)
            process = RankProcess(number, *remote, log)
        else:
            process = start_process(
                self._order_file,
                number,
                slot=number,
                threads=threads,
                log=log,
                interface=self._interface,
            )
        self.by_number[number] = self._listen_to(process)

    def start_spare(self) -> None:
        """Start a process that loads its code and waits for a device."""
        self._spares += 1
        slot, log = len(self._devices) + self._spares, self._work / "logs" / "spare.log"
        self.spare = self._listen_to(
            start_process(
                self._order_file, None, slot=slot, threads=1, log=log, interface=self._interface
            )
        )

    def assign_spare(self, number: int) -> None:
        """Make the spare process this device's process."""
        assert self.spare is not None
        self.by_number[number], self.spare = self.spare, None
        self.by_number[number].number = number
        self.by_number[number].channel.send("device", number=number)
        self._spares -= 1

    def _listen_to(self, process: RankProcess) -> RankProcess:
        self._selector.register(process.channel.socket, selectors.EVENT_READ, process)
        return process

    def reporting(self, timeout_s: float) -> list[RankProcess]:
        """The processes that have sent a message or ended, waiting at most `timeout_s`."""
        return [key.data for key, _ in self._selector.select(timeout=timeout_s)]

    def remove(self, process: RankProcess) -> None:
        """Forget a process that has ended."""
        self._selector.unregister(process.channel.socket)
        process.channel.close()
        if process is self.spare:
            self.spare = None
        elif process.number is not None:
            self.shares[process.number].let_go()
            del self.by_number[process.number]

    def image(self, number: int) -> str:
        """The id of the image in which a rank runs; empty outside containers."""
        return self._hosts.image(number) if self._hosts is not None else ""

    def host_changes(self) -> tuple[frozenset[int], frozenset[int]]:
        """The devices whose hosts were lost, and whose hosts came back, since the last call."""
        if self._hosts is None:
            return frozenset(), frozenset()
        for number, share in self._hosts.returned().items():
            self.shares[number] = share
        before = self._unreachable
        numbers = range(len(self._devices))
        self._unreachable = frozenset(filter(self._hosts.is_gone, numbers))
        return self._unreachable - before, before - self._unreachable

    def ending(self) -> frozenset[int]:
        """The devices whose hosts a cluster is about to take back."""
        if self._hosts is None:
            return frozenset()
        numbers = frozenset(filter(self._hosts.is_ending, range(len(self._devices))))
        return numbers - self._unreachable

    def give_back(self, numbers: Iterable[int]) -> None:
        """End the connections to the hosts of these devices."""
        for number in numbers:
            assert self._hosts is not None
            self._hosts.give_back(number)

    def close(self, grace_s: float) -> None:
        """End all processes: those that are done get `grace_s` to exit, the others none."""
        deadline = time.monotonic() + grace_s
        for share in self.shares:
            share.let_go()
        processes = [*self.by_number.values(), *([self.spare] if self.spare is not None else [])]
        for one in processes:
            if one.done is not None:
                one.channel.send("exit")
            else:
                one.kill()
        for one in processes:
            try:
                one.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.kill()
        for one in processes:
            one.process.wait()
            one.channel.close()
        for share in self.shares:
            share.remove()
        self._selector.close()
        if self._hosts is not None:
            self._hosts.close()
        self.rendezvous.close()
