"""The processes of one launch: starts a rank for each device, holds it to its share, listens to it, ends it. Loads no torch.

Ranks die with the launcher, whatever ends it; the launcher ends all of them when one fails.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.infra.process import dying_with_parent
from trainwright.tasks import progress
from trainwright.tasks.errors import Interrupted, RunHeld, TrainingFailed, TrainwrightError, from_document
from trainwright.tasks.train import cpu_share
from trainwright.tasks.train.channel import VARIABLE, LauncherChannel
from trainwright.tasks.train.confirmations import Confirmations
from trainwright.tasks.train.cpu_share import CpuShare
from trainwright.tasks.train.request import Order

STOP_GRACE_S = 3.0
SAVE_GRACE_S = 30.0  # from then on, where the last checkpoint is being written
_CAUSE_GRACE_S = 1.0
_END_GRACE_S = 3.0
_ASK_EVERY_S = 1.0
_LOOPBACK = "127.0.0.1"
# What an outer launcher, another training or the scheduler has set is not for the ranks.
_SCRUBBED = (
    "AIRFLOW", "_AIRFLOW", "GLOO_", "HOROVOD_", "KMP_", "MASTER_", "MKL_", "OMPI_", "OMP_", "PMI", "TORCHELASTIC_",
    "LOCAL_RANK", "RANK", "WORLD_SIZE",
)  # fmt: skip
Message = dict[str, Any]


class Ranks:
    """Ranks that run while the block does. Its thread must live as long: the kernel ties their lives to it."""

    def __init__(self, order: Order, stop: threading.Event | None, still_mine: Callable[[], bool] | None) -> None:
        self._order, self._stop, self._still_mine = order, stop or threading.Event(), still_mine or (lambda: True)
        self._work = Path(order.request.work_folder)
        self._devices = order.request.plan.devices
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[LauncherChannel] = []
        self._shares: list[CpuShare] = []
        self._rendezvous: Any = None
        self._done: dict[int, Message] = {}
        self._errors: dict[int, TrainwrightError] = {}
        self._parts = Confirmations(len(self._devices))
        self._saving = False
        self._stop_asked_at: float | None = None
        self._asked_at = time.monotonic()

    @property
    def shares(self) -> list[str]:
        """How each rank is held to its share of the CPU."""
        return [share.how for share in self._shares]

    def __enter__(self) -> Ranks:
        cpu_share.remove_stale_cgroups()
        (self._work / "logs").mkdir(parents=True, exist_ok=True)
        (self._work / "meeting").unlink(missing_ok=True)
        order = self._work / "order.json"
        try:
            self._shares = [CpuShare(str(rank), device.cores) for rank, device in enumerate(self._devices)]
            groups = [str(share.group) if share.group else None for share in self._shares]
            order.write_text(self._order.model_copy(update={"cgroups": groups}).model_dump_json(by_alias=True))
            common = self._environment()
            for rank in range(len(self._devices)):
                self._start(rank, order, common)
        except BaseException:
            self.__exit__()
            raise
        progress.emit("ranks", backend=self._order.backend, devices=[one.id for one in self._devices], cpu=self.shares)
        return self

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED)}
        environment |= {"PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if self._order.backend == "horovod":
            from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
            from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

            # horovodrun's own server listens on every address; this one on loopback only.
            self._rendezvous = RendezvousHTTPServer((_LOOPBACK, 0), RendezvousHandler, 0)
            count = len(self._devices)
            self._rendezvous.init(get_host_assignments(parse_hosts(f"localhost:{count}"), count))
            threading.Thread(target=self._rendezvous.serve_forever, name="rendezvous", daemon=True).start()
            environment |= {
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": _LOOPBACK,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._rendezvous.server_address[1]),
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_IFACE": "lo",
                # Ranks of small shares start slowly; one that dies is noticed here, not by this timeout.
                "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
                # A rank that hangs without dying; long enough to wait for a checkpoint that must not be skipped.
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1800",
                # What is fused depends on timing, and with it the order, and so the last digit, of a sum.
                "HOROVOD_FUSION_THRESHOLD": "0",
            }
        return environment

    def _start(self, rank: int, order: Path, common: dict[str, str]) -> None:
        size, number = str(len(self._devices)), str(rank)
        channel = LauncherChannel()
        self._channels.append(channel)
        descriptor = channel.other_end.fileno()
        environment = common | {
            "OMP_NUM_THREADS": str(max(1, int(self._devices[rank].cores or 1))), VARIABLE: str(descriptor),
            "HOROVOD_HOSTNAME": "localhost", "HOROVOD_RANK": number, "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": number, "HOROVOD_LOCAL_SIZE": size, "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
        }  # fmt: skip
        command = dying_with_parent([sys.executable, "-m", "trainwright.tasks.train.worker", str(order), number])
        with self._log(rank).open("ab") as log:
            process = subprocess.Popen(
                command, env=environment, pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        channel.other_end.close()
        self._processes.append(process)

    def _log(self, rank: int) -> Path:
        return self._work / "logs" / f"rank-{rank}.log"

    def watch(self) -> list[Message]:
        """Until every rank is done; each one's last words.

        Raises what the rank that failed first has said, Interrupted where the ranks could not stop in time, RunHeld where
        the devices are no longer ours.
        """
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel.socket, selectors.EVENT_READ, rank)
            failed_at: float | None = None
            # A rank that is done may still hang while it leaves the others; __exit__ bounds that.
            while selector.get_map() and len(self._done) < len(self._processes):
                try:
                    self._obey()
                    for key, _ in selector.select(timeout=0.05):
                        self._listen(key.data)
                        if self._channels[key.data].closed:
                            selector.unregister(key.fileobj)
                            self._left(key.data)
                    if self._errors:
                        failed_at = failed_at or time.monotonic()
                        self._raise_cause(may_wait=time.monotonic() - failed_at < _CAUSE_GRACE_S)
                except KeyboardInterrupt:
                    self._stop.set()
        if self._errors:
            self._raise_cause(may_wait=False)
        return [self._done[rank] for rank in range(len(self._processes))]

    def _obey(self) -> None:
        now = time.monotonic()
        if now - self._asked_at > _ASK_EVERY_S:
            self._asked_at = now
            self._require_mine()
        if self._stop.is_set() and self._stop_asked_at is None:
            self._stop_asked_at = now
            for process in self._processes:
                process.send_signal(signal.SIGTERM)
        if self._stop_asked_at is not None and now - self._stop_asked_at > self._grace_s():
            raise Interrupted(
                "stopped; a step took too long to wait for its end, so the last checkpoint is what is kept"
            )

    def _grace_s(self) -> float:
        return STOP_GRACE_S + (SAVE_GRACE_S if self._saving else 0.0)

    def _require_mine(self) -> None:
        if not self._still_mine():
            raise RunHeld("the lease on the devices was lost while training; the last checkpoint is kept")

    def _listen(self, rank: int) -> None:
        for message in self._channels[rank].read():
            kind = message.pop("kind")
            if kind == "done":
                self._done[rank] = message
            elif kind == "error" and rank not in self._done:  # what fails after the last word is in the log
                self._errors.setdefault(
                    rank, from_rank(rank, self._devices[rank].id, message["error"], self._log(rank))
                )
            elif kind == "ask":
                self._require_mine()
                self._answer(rank, message)
            elif kind == "part":
                self._parts.note(rank, message)
            elif kind == "saving":
                self._saving = True
            else:
                progress.emit(kind, **message)
        if (found := self._parts.answer()) is not None:
            self._channels[0].go_on(**found)

    def _answer(self, rank: int, message: Message) -> None:
        if message["about"] == "parts":  # when all are in
            self._parts.ask(message["step"])
            return
        if message["about"] == "ready":
            self._shares[rank].hold(self._processes[rank].pid)
        self._channels[rank].go_on(**(self._parts.known(message["step"]) if message["about"] == "stored" else {}))

    def _left(self, rank: int) -> None:
        """A rank's end has closed: it is done, has said why not, or was killed."""
        if rank in self._done or rank in self._errors:
            return
        self._shares[rank].let_go()
        code = self._processes[rank].wait()
        if self._stop_asked_at is not None and code == -signal.SIGTERM:
            raise Interrupted("stopped before the first step; nothing was changed")
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with {code}"
        self._errors[rank] = TrainingFailed(
            f"rank {rank} ({self._devices[rank].id}) {how}; its log is {self._log(rank)}", rank=rank
        )

    def _raise_cause(self, *, may_wait: bool) -> None:
        """Raise the first error that is not merely of a rank that lost another; give that one a moment to be noticed."""
        for error in self._errors.values():
            if error.details.get("caused_by_another") is None:
                raise error
        if not may_wait:
            raise next(iter(self._errors.values()))

    def __exit__(self, *_: object) -> None:
        all_done = len(self._done) == len(self._processes)
        deadline = time.monotonic() + (_END_GRACE_S if all_done else 0.0)
        for share in self._shares:
            share.let_go()
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with what the model's code has started
        for process in self._processes:
            process.wait()
        for share in self._shares:
            share.remove()
        for channel in self._channels:
            channel.close()
        if self._rendezvous is not None:
            self._rendezvous.shutdown()
            self._rendezvous.server_close()


def from_rank(rank: int, device: str, document: Message, log: Path) -> TrainwrightError:
    """What a rank said, as an error that names it. Bad input, and a lost lease, read the same from every rank."""
    error = from_document(document)
    if error.exit_code != TrainingFailed.exit_code or isinstance(error, RunHeld):
        return error
    caused_by_another = {"caused_by_another": True} if document["kind"] == "peers_lost" else {}
    return TrainingFailed(f"rank {rank} ({device}): {error}; its log is {log}", rank=rank, **caused_by_another)
