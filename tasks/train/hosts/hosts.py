"""The remote hosts of one launch: connects to them, checks them, and prepares them for ranks.

Before the first rank starts, each host must run the same versions and sources as this machine, or
all hosts the same image, and be able to connect to the launcher. By ssh it must present its known
host key. It also receives the model's source and the data, whose content must equal the validated
content. A host that is lost during training passes the same checks when it answers again. `session`
is the connection to one host; `agent` runs on the host; `host_addresses` finds the addresses at
which they reach each other. Loads no torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from trainwright.estimator.interfaces import interface_of
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.spec.host_spec import Host
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.train.checkpoint.checkpoint_transfer import TransferServer
from trainwright.tasks.train.hosts import versions
from trainwright.tasks.train.hosts.arrivals import Arrivals
from trainwright.tasks.train.hosts.choose_engine import engine_of
from trainwright.tasks.train.hosts.container import PYTHON
from trainwright.tasks.train.hosts.data_staging import DataStaging
from trainwright.tasks.train.hosts.host_addresses import (
    interface_variables,
    own_address,
    reached_from,
)
from trainwright.tasks.train.hosts.host_engine import HostRequest
from trainwright.tasks.train.hosts.host_order import order_there, require_gpus
from trainwright.tasks.train.hosts.reconnect import Reconnector, Shares
from trainwright.tasks.train.hosts.remote_rank import (
    LaterShare,
    RemoteChannel,
    RemoteRank,
    RemoteShare,
)
from trainwright.tasks.train.hosts.session import Session
from trainwright.tasks.train.request import Order

_END_GRACE_S = 5.0
_CHECK_EVERY_S = 0.5
_ORDER = "order.json"
Message = dict[str, Any]


def machine(device: PlannedDevice) -> str:
    """The machine of a device: equal for two devices if they share a machine."""
    return "localhost" if device.local else device.address


class Hosts:
    """Connections to the hosts of a launch, checked and prepared for ranks. Ends with `close`."""

    def __init__(self, order: Order, folder: Path, check_stop: Callable[[], None]) -> None:
        """Prepares all hosts. Calls `check_stop` twice a second; it raises to stop this."""
        self._order, self._folder, self._check_stop = order, folder, check_stop
        self._devices = order.request.plan.devices
        self._pool = load_pool(order.request.job.pool)
        self._engine = engine_of(self._pool, order.request.settings, order.request.job.name)
        self._sessions: dict[str, Session] = {}
        self._arrivals: Arrivals | None = None
        self._variables: dict[str, dict[str, str]] = {}
        self._data: dict[str, str] = {}
        self._images: dict[str, str] = {}
        self._reconnector: Reconnector | None = None
        self.peers: set[str] = set()
        """The addresses from which ranks connect."""
        try:
            self._connect()
            self.address = own_address(self._came_by, list(self._sessions))
            """this machine's address, as the hosts see it"""
            self._each(self._reach)
            self._each(self._stage_files)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        for device in self._devices:
            if not device.local and device.address not in self._sessions:
                self._sessions[device.address] = self._session_with(device.address)
        self._arrivals = Arrivals(self._order, self._sessions, self._session_with)
        found = self._arrivals.first(self._check_stop)
        # Ranks on this machine run no image: then versions must be equal everywhere.
        remote, there = all(not device.local for device in self._devices), list(found.values())
        self._image = there[0]["image"] if remote and versions.same_image(there) else ""
        self._came_by: list[str] = self._each(lambda session: self._check(session, found[session]))

    def _session_with(self, address: str) -> Session:
        used = tuple(device for device in self._devices if device.address == address)
        named = {host.name: host for host in self._pool.hosts}
        host = named.get(used[0].host) or Host.model_construct(name=used[0].host)
        host = host.model_copy(update={"address": address})
        container = self._pool.container_of(host)
        inside = container is not None or self._pool.engine == "kubernetes"
        python = host.python or (PYTHON if inside else sys.executable)
        asked = HostRequest(host, used, python, container)
        return Session(asked, self._engine, self._folder)

    def _each(self, action: Callable[[Session], Any]) -> list[Any]:
        """Run an action on all hosts that are there, in parallel. Raises the first host's error."""
        with ThreadPoolExecutor(max_workers=len(self._sessions)) as pool:
            tasks = [pool.submit(action, one) for one in self._there()]
            try:
                while wait(tasks, timeout=_CHECK_EVERY_S).not_done:
                    self._check_stop()
            except BaseException:
                for session in self._sessions.values():
                    session.hang_up("the launch has ended")
                raise
        return [task.result() for task in tasks]

    def _there(self) -> list[Session]:
        """The connections to hosts that are not queued any more."""
        queued = self._arrivals.queued if self._arrivals is not None else {}
        return [one for address, one in self._sessions.items() if address not in queued]

    def _check(self, session: Session, there: Message) -> str:
        one_image = self._image != "" and there["image"] == self._image
        here = versions.facts()
        found = versions.differences(here, there, self._order.backend, one_image=one_image)
        if found:
            raise BadInput(
                f"{session}: {found[0]}; allowed: the same on all hosts", differences=found
            )
        require_gpus(self._devices, session.address, there["gpus"])
        session.begin()
        self._images[session.address] = there["image"]
        came = f"{session} has come" if session.waits else ""
        if there["node"]:
            gpus = f", GPU {there['gpus']}" if there["gpus"] else ""
            came = f"{session}: Slurm gave node {there['node']}{gpus}"
        if came:
            progress.emit("notice", message=came, host=session.name, waits=False)
        return str(there["came_by"])

    def _stage_files(self, session: Session) -> None:
        """Copy the model's source to a host, and the data if the host lacks it."""
        folder = Path(self._order.request.source_folder)
        for path in sorted(
            one for one in folder.rglob("*") if one.is_file() and "__pycache__" not in one.parts
        ):
            session.put(f"source/{path.relative_to(folder).as_posix()}", path)
        session.sync()
        self._data[session.address] = DataStaging(session, self._order).run()

    def _reach(self, session: Session) -> None:
        """Check that the host can connect to this machine, and record the interface it uses."""
        self._variables[session.address], peer = reached_from(session, self.address)
        self.peers.add(peer)

    @property
    def own_interface(self) -> dict[str, str]:
        """The interface variables for the ranks on this machine."""
        return interface_variables(interface_of(self.address), self.address)

    def share(self, rank: int) -> RemoteShare | LaterShare:
        """The rank's share of its host's CPU."""
        if self.is_gone(rank):
            return LaterShare()
        return RemoteShare(self._session(rank), str(rank), self._devices[rank].cores)

    def give_order(self, order: Order) -> None:
        """Put the order on every host. From now on, lost hosts are reconnected during training."""
        self._order = order
        for session in self._there():
            self._give_order(order, session)
        if order.mode == "train":
            self._reconnector = Reconnector(self._lost, self._connection, self._admit)

    def _give_order(self, order: Order, session: Session) -> None:
        there = order_there(order, session, self._data[session.address])
        text = there.model_dump_json(by_alias=True)
        session.put(_ORDER, text.encode())

    def _lost(self) -> list[str]:
        assert self._arrivals is not None
        sessions = self._sessions.items()
        return [one for one, session in sessions if session.gone or one in self._arrivals.queued]

    def _connection(self, address: str) -> Session:
        """The connection that is still queued, or another one to a lost host."""
        assert self._arrivals is not None
        return self._arrivals.take(address) or self._session_with(address)

    def _admit(self, session: Session) -> Shares:
        """Check and prepare a host that was lost. Returns its ranks' new CPU shares."""
        assert self._arrivals is not None
        self._check(session, self._arrivals.hello(session))
        self._reach(session)
        self._stage_files(session)
        shares = {
            rank: RemoteShare(session, str(rank), device.cores)
            for rank, device in enumerate(self._devices)
            if not device.local and device.address == session.address
        }
        groups = [
            shares[rank].group if rank in shares else group
            for rank, group in enumerate(self._order.cgroups)
        ]
        self._give_order(self._order.model_copy(update={"cgroups": groups}), session)
        return shares

    def returned(self) -> Shares:
        """The ranks on hosts that have reconnected since the last call, with their CPU shares."""
        ranks: Shares = {}
        found = self._reconnector.back if self._reconnector is not None else {}
        for address, (session, shares) in list(found.items()):
            if self._sessions[address] is not session:
                self._sessions[address].close(_END_GRACE_S)  # its connection ended earlier
            self._sessions[address] = session
            if self._arrivals is not None:
                self._arrivals.queued.pop(address, None)
            del found[address]
            ranks |= shares
        return ranks

    def start(
        self, rank: int, environment: dict[str, str], log: Path
    ) -> tuple[RemoteRank, RemoteChannel]:
        """Start a rank on its host. Returns the rank's process and channel."""
        session, name = self._session(rank), str(rank)
        channel = RemoteChannel(session, name)
        server = TransferServer(self._folder, self._order.launch, rank)
        process = RemoteRank(session, name, channel, server, log)
        command = [
            session.python,
            "-P",
            "-m",
            "trainwright.tasks.train.worker.entry",
            f"{session.work}/{_ORDER}",
            name,
        ]
        session.start(name, command, environment | self._variables[session.address], process)
        return process, channel

    def image(self, rank: int) -> str:
        """The id of the image in which the rank runs; empty outside containers."""
        return self._images.get(self._devices[rank].address, "")

    def is_gone(self, rank: int) -> bool:
        """Whether there is no connection to the rank's host."""
        if self._devices[rank].local or self._arrivals is None:
            return False
        queued = self._devices[rank].address in self._arrivals.queued
        return queued or self._session(rank).gone

    def is_ending(self, rank: int) -> bool:
        """Whether a cluster is about to take the rank's host back."""
        return not self._devices[rank].local and self._session(rank).ending

    def give_back(self, rank: int) -> None:
        """End the connection to the rank's host, and so all that runs there."""
        self._session(rank).hang_up("it was given back to the cluster")

    def _session(self, rank: int) -> Session:
        return self._sessions[self._devices[rank].address]

    def close(self) -> None:
        """End all processes on the hosts, and the connections."""
        with contextlib.ExitStack() as closing:  # from below, also if one of them fails
            closing.callback(self._engine.close)
            if self._reconnector is not None:
                closing.callback(self._reconnector.close)
            closing.callback(self._close_sessions)
            if self._reconnector is not None:
                self._reconnector.settle()

    def _close_sessions(self) -> None:
        if self._sessions:
            with ThreadPoolExecutor(max_workers=len(self._sessions)) as pool:
                list(pool.map(lambda session: session.close(_END_GRACE_S), self._sessions.values()))
