"""Starts the ranks of a training on this machine, watches them, gathers what they did. Loads no torch.

Ranks die with the launcher, whatever ends it; the launcher ends all of them when one fails.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from trainwright.estimator.curves import Interval
from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.infra.process import dying_with_parent
from trainwright.tasks import progress
from trainwright.tasks.artefacts import Checkpoint, DeviceResult, Measured, PlannedDevice, Result, SplitEvent
from trainwright.tasks.errors import BadInput, Interrupted, TrainingFailed, TrainwrightError, from_document
from trainwright.tasks.objects import FolderStore, ObjectStore, open_store
from trainwright.tasks.pool import load_pool
from trainwright.tasks.train import checkpoint, cpu_share
from trainwright.tasks.train.metrics import drop_after
from trainwright.tasks.train.request import Order, RampPoint, TrainRequest

STOP_GRACE_S = 2.5
_LOOPBACK = "127.0.0.1"
Message = dict[str, Any]


def train(
    request: TrainRequest, *, stop: threading.Event | None = None, still_mine: Callable[[], bool] | None = None
) -> Result:
    """Train by a plan, from the newest checkpoint where `resume` is set and there is one.

    `stop` ends it at the next step, with a checkpoint; `still_mine` is asked now and then whether the devices still are ours.
    Raises TrainingFailed naming the rank, Interrupted, BadInput where a device is not on this machine.
    """
    _check_devices(request.plan.devices)
    work = Path(request.work_folder)
    store = _store(request)
    started = time.monotonic()
    folder, resumed = work / "resume", None
    shutil.rmtree(folder, ignore_errors=True)
    state = checkpoint.fetch_latest(store, folder) if request.resume else None
    if state is not None and sum(state.split) == request.plan.global_batch_size:
        (folder / "state.json").write_text(json.dumps(state.__dict__))
        resumed = state.step
    drop_after(store, (resumed or 0) - 1)
    order = Order(
        request=request, mode="train", backend=backend(request.job.train.backend),
        checkpoint=str(folder) if resumed is not None else None,
    )  # fmt: skip
    try:
        with Ranks(order, work) as ranks:
            done = ranks.watch(stop or threading.Event(), still_mine or (lambda: True))
            shares = list(ranks.shares)
    finally:
        keep_files(store, work)
    if done[0]["stopped"]:
        raise Interrupted(f"stopped after step {done[0]['step']}; its checkpoint is kept", step=done[0]["step"])
    return _result(request, store, done, shares, time.monotonic() - started, resumed)


def ramp(request: TrainRequest, learning_rates: list[float], *, stop: threading.Event | None = None) -> list[RampPoint]:
    """Train with a learning rate that rises step by step, on the real model, data and split; nothing is kept."""
    _check_devices(request.plan.devices)
    order = Order(
        request=request, mode="ramp", backend=backend(request.job.train.backend), learning_rates=learning_rates
    )  # fmt: skip
    asked = stop or threading.Event()
    with Ranks(order, Path(request.work_folder)) as ranks:
        done = ranks.watch(asked, lambda: True)
    if asked.is_set():
        raise Interrupted("stopped while the learning rate was searched")
    return [RampPoint.model_validate(point) for point in done[0]["points"]]


def backend(wanted: str) -> Literal["horovod", "torch"]:
    """The collectives' library: what the job names, or Horovod where it is installed. Raises BadInput where it is not."""
    has_horovod = importlib.util.find_spec("horovod") is not None
    if wanted == "horovod" and not has_horovod:
        raise BadInput(
            "train.backend: got 'horovod', which is not installed; `python -m trainwright.infra.horovod` builds it"
        )
    chosen: Literal["horovod", "torch"] = "horovod" if has_horovod and wanted != "torch" else "torch"
    progress.emit("backend", backend=chosen)
    return chosen


def keep_files(store: ObjectStore, work: Path) -> None:
    """Put logs and TensorBoard events into the run folder."""
    if isinstance(store, FolderStore) and store.root == work:
        return
    for path in sorted([*work.glob("logs/*.log"), *work.glob("events/*")]):
        store.put_file(path.relative_to(work).as_posix(), path)


def _store(request: TrainRequest) -> ObjectStore:
    return open_store(request.run_uri) if request.run_uri is not None else FolderStore(Path(request.work_folder))


def _check_devices(devices: list[PlannedDevice]) -> None:
    for device in devices:
        if not device.local:
            raise BadInput(
                f"{device.id}: is on {device.address}; training on other hosts than this one is not there yet"
            )


class Ranks:
    """The processes of one launch. Leaving the block ends them all."""

    def __init__(self, order: Order, work: Path) -> None:
        self.order, self.work = order, work
        self.devices = order.request.plan.devices
        self.processes: list[subprocess.Popen[bytes]] = []
        self.shares: list[str] = []
        self._groups: list[Path | None] = []
        self._cycles: list[cpu_share.DutyCycle] = []
        self._channels: list[int] = []
        self._rendezvous: Any = None
        self._finished = False

    def __enter__(self) -> Ranks:
        cpu_share.remove_stale_cgroups()
        (self.work / "logs").mkdir(parents=True, exist_ok=True)
        for rank, device in enumerate(self.devices):
            group = cpu_share.make_cgroup(str(rank), device.cores) if device.cores is not None else None
            self._groups.append(group)
            fraction = device.cores is not None and device.cores < 1
            self.shares.append("cgroup" if group else "duty cycle" if fraction else "nothing")
        order = self.order.model_copy(update={"cgroups": [str(group) if group else None for group in self._groups]})
        path = self.work / "order.json"
        path.write_text(order.model_dump_json(by_alias=True))
        try:
            common = self._common_environment()
            for rank in range(len(self.devices)):
                self._start(rank, path, common)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _common_environment(self) -> dict[str, str]:
        stale = ("HOROVOD_", "OMPI_", "PMIX_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(stale)}
        environment |= {"PYTHONUNBUFFERED": "1", "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(_free_port())}
        if self.order.backend == "horovod":
            from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
            from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

            # Horovod's own starter listens on every address; ours on loopback only.
            self._rendezvous = RendezvousHTTPServer((_LOOPBACK, 0), RendezvousHandler, 0)
            count = len(self.devices)
            self._rendezvous.init(get_host_assignments(parse_hosts(f"localhost:{count}"), count))
            threading.Thread(target=self._rendezvous.serve_forever, name="rendezvous", daemon=True).start()
            environment |= {
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": _LOOPBACK,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._rendezvous.server_address[1]),
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_IFACE": "lo",
                "HOROVOD_CYCLE_TIME": "0.2",  # ms: one buffer a step is summed, there is nothing to wait and fuse
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
            }
        return environment

    def _start(self, rank: int, order: Path, common: dict[str, str]) -> None:
        size = str(len(self.devices))
        threads = str(max(1, int(self.devices[rank].cores or 1)))
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        environment = common | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "OMP_NUM_THREADS": threads,
            "HOROVOD_HOSTNAME": "localhost", "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_LOCAL_SIZE": size, "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1", "TRAINWRIGHT_CHANNEL": str(writer),
        }  # fmt: skip
        command = dying_with_parent([sys.executable, "-m", "trainwright.tasks.train.worker", str(order)])
        with (self.work / "logs" / f"rank-{rank}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=environment, pass_fds=[writer], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        os.close(writer)
        self.processes.append(process)
        self._channels.append(reader)

    def watch(self, stop: threading.Event, still_mine: Callable[[], bool]) -> list[Message]:
        """Until every rank is done; each one's last words. Raises what the first failing rank said."""
        done: list[Message | None] = [None] * len(self.processes)
        error: TrainwrightError | None = None
        asked: float | None = None
        with selectors.DefaultSelector() as selector:
            lines = {}
            for rank, channel in enumerate(self._channels):
                selector.register(channel, selectors.EVENT_READ, rank)
                lines[rank] = b""
            while selector.get_map():
                if asked is None and (stop.is_set() or not still_mine()):
                    asked = time.monotonic()
                    for process in self.processes:
                        process.send_signal(signal.SIGTERM)
                if asked is not None and time.monotonic() - asked > STOP_GRACE_S:
                    raise Interrupted("stopped; the ranks did not end in time for a checkpoint, the last one is kept")
                for key, _ in selector.select(timeout=0.1):
                    rank = key.data
                    chunk = os.read(key.fd, 65536)
                    if not chunk:
                        selector.unregister(key.fd)
                        if done[rank] is None:
                            raise error or self._died(rank)
                        continue
                    *whole, lines[rank] = (lines[rank] + chunk).split(b"\n")
                    for line in whole:
                        message = json.loads(line)
                        if message["kind"] == "done":
                            done[rank] = message
                        elif message["kind"] == "error":
                            error = error or self._failed(rank, message["error"])
                        else:
                            self._heard(rank, message)
        self._finished = True
        return [message for message in done if message is not None]

    def _heard(self, rank: int, message: Message) -> None:
        kind = message.pop("kind")
        if kind == "ready":
            cores = self.devices[rank].cores
            if self.shares[rank] == "duty cycle" and cores is not None:
                self._cycles.append(cpu_share.DutyCycle(self.processes[rank].pid, cores))
        else:
            progress.emit("train" if kind == "progress" else kind, **message)

    def _failed(self, rank: int, document: Message) -> TrainwrightError:
        error = from_document(document)
        if isinstance(error, TrainingFailed):
            return TrainingFailed(
                f"rank {rank} ({self.devices[rank].id}): {error}; its log is {self._log(rank)}", rank=rank
            )
        return error

    def _died(self, rank: int) -> TrainingFailed:
        """A rank's channel closed without a word: it was killed, or crashed."""
        try:
            code = self.processes[rank].wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"killed by signal {-code}" if code < 0 else f"ended with {code}"
        return TrainingFailed(
            f"rank {rank} ({self.devices[rank].id}) was {how}; its log is {self._log(rank)}", rank=rank
        )

    def _log(self, rank: int) -> Path:
        return self.work / "logs" / f"rank-{rank}.log"

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            try:  # a rank that is done needs a moment to leave; one that is not is not waited for
                process.wait(timeout=3 if self._finished else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for cycle in self._cycles:
            cycle.end()
        for group in filter(None, self._groups):
            cpu_share.remove_cgroup(group)
        for channel in self._channels:
            os.close(channel)
        if self._rendezvous is not None:
            self._rendezvous.shutdown()
            self._rendezvous.server_close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _result(
    request: TrainRequest,
    store: ObjectStore,
    done: list[Message],
    shares: list[str],
    duration: float,
    resumed: int | None,
) -> Result:
    plan, job = request.plan, request.job
    first = done[0]
    devices = [
        DeviceResult(
            id=device.id, type=device.type, rank=rank, batch_size=said["batch_size"], samples=said["samples"],
            step_time_s=Interval.model_validate(said["own_time_s"]) if said["own_time_s"] else None,
            wait_s=said["wait_s"], peak_memory_bytes=said["peak_memory_bytes"], cpu_s=said["cpu_s"], share=share,
        )
        for rank, (device, said, share) in enumerate(zip(plan.devices, done, shares, strict=True))
    ]  # fmt: skip
    energy, cost = _energy_and_cost(request, done, duration)
    target = job.train.target
    metrics = {name: float(value) for name, value in first["metrics"].items()}
    reached = None
    if target is not None and target.metric in metrics:
        value = metrics[target.metric]
        reached = value <= target.value if target.metric == "loss" else value >= target.value
    states = checkpoint.list_states(store)
    return Result(
        state="success", metrics=metrics, target_reached=reached, predicted=plan.predicted,
        measured=Measured(
            step_time_s=_joint_step_time(store), duration_s=duration,
            peak_memory_bytes=max(device.peak_memory_bytes for device in devices), energy_j=energy,
            energy_source="datasheet" if energy is not None else None, cost=cost,
        ),
        devices=devices, split_events=[SplitEvent.model_validate(event) for event in first["events"]],
        checkpoints=[
            Checkpoint(path=checkpoint.folder_name(state.step), step=state.step, metrics=state.metrics, best=state.best)
            for state in states
        ],
        learning_rate=request.learning_rate, global_batch_size=plan.global_batch_size, steps=first["step"],
        epochs=job.train.epochs, resumed_from_step=resumed, backend=first["backend"],
        versions={name: importlib.metadata.version(name) for name in ("trainwright", "torch")},
    )  # fmt: skip


def _joint_step_time(store: ObjectStore) -> Interval | None:
    """Median, 5th and 95th percentile of rank 0's whole steps, waiting included."""
    import io

    import pyarrow.parquet as pq

    times: list[float] = []
    for item in store.list("metrics/steps-rank0-"):
        times += pq.read_table(io.BytesIO(store.get(item.key)), columns=["step_time_s"])["step_time_s"].to_pylist()
    if not times:
        return None
    times.sort()
    low, median, high = (times[min(len(times) - 1, int(share * len(times)))] for share in (0.05, 0.5, 0.95))
    return Interval(low=low, median=median, high=high)


def _energy_and_cost(request: TrainRequest, done: list[Message], duration: float) -> tuple[float | None, float | None]:
    """Time measured, power from the pool or the datasheet: load while a rank works, idle while it waits."""
    pool = load_pool(request.job.pool)
    energy = rent = 0.0
    for device, said in zip(request.plan.devices, done, strict=True):
        cores = device.cores or 1.0
        known = DEVICE_TYPES[device.type]
        override = pool.power.get(device.type)
        idle = override.idle_w if override else known.idle_w * cores
        load = override.load_w if override else known.load_w * cores
        energy += load * said["busy_s"] + idle * max(0.0, duration - said["busy_s"])
        rent += pool.prices.get(device.type, 0.0) * duration / 3600
    cost = rent + pool.prices.get("energy", 0.0) * energy / 3.6e6 if pool.prices else None
    return energy, cost
