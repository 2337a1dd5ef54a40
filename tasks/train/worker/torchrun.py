"""A rank under torchrun: `torchrun … -m trainwright.tasks.train.worker.entry ORDER.json`.

There is no trainwright launcher: rank and world size come from the environment, sums use
torch.distributed whatever the order says, and messages are printed. All ranks form one worker
group. If a rank is lost, or delays a sum beyond the job's `stall_timeout`, all ranks exit, and
torchrun restarts them (`--max-restarts`) from the newest checkpoint. Rank 0 replaces the launcher:
it holds the right to train the run, uploads the checkpoints, and stops if it loses the right.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.tasks.errors import (
    BadInput,
    RunHeld,
    TrainingFailed,
    TrainwrightError,
    from_document,
)
from trainwright.tasks.leases.launch_right import own_name, resource
from trainwright.tasks.leases.ledger import Heartbeat, Holder, Ledger
from trainwright.tasks.runs.artefacts.run_status import Status
from trainwright.tasks.runs.run import Run
from trainwright.tasks.train.channel import Message, PeerStatus, RankStatus
from trainwright.tasks.train.checkpoint import fence, staged
from trainwright.tasks.train.checkpoint.checkpoint_transfer import JOURNAL, TransferServer
from trainwright.tasks.train.checkpoint.coordinator import Coordinator
from trainwright.tasks.train.checkpoint.uploader import Uploader, recover, rewind
from trainwright.tasks.train.exchange.collective import TORCHRUN, torchrun_store
from trainwright.tasks.train.request import Order, TrainRequest
from trainwright.tasks.train.worker_group import WorkerGroup, needs_transfers, sums_on_devices

_LEAST_PAUSE_S, _LOOK_S = 0.25, 0.05


class TorchrunChannel:
    """Prints messages. Rank 0 coordinates checkpoints; the other ranks report to it.

    They report through torchrun's store. It suffices: rank 0's part holds all tensors of a
    checkpoint. Ranks on other nodes than rank 0 add their journal rows.
    """

    def __init__(self) -> None:
        self.number, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.leave_asked = self.abort_asked = -1
        self.writing = False
        self.released: Callable[[int, int], None] = lambda step, stored: None
        self._last = 0.0
        self._group: WorkerGroup | None = None
        self._done = False
        self._store: Any = None
        self._sending = threading.Lock()
        self._held = contextlib.ExitStack()
        self._patience_s = 0.0
        # used by rank 0
        self._uploader: Uploader | None = None
        self._coordinator: Coordinator | None = None
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._awaited: queue.Queue[tuple[int, int]] = queue.Queue()
        # used by the other ranks
        self._rows: list[Message] = []

    def begin(self, order: Order) -> Order:
        """Take over the run. Returns the order with the values that apply here.

        Raises BadInput if torchrun has not started exactly one rank per device of the plan, and
        RunHeld if another process trains or holds the run.
        """
        request, work = order.request, Path(order.request.work_folder)
        if self.size != (devices := len(request.plan.devices)):
            raise BadInput(
                f"WORLD_SIZE: got {self.size}; allowed: {devices}, one rank per device of the plan"
            )
        if self.number == 0:
            try:
                said = self._take_over(request, work)
            except TrainwrightError as error:
                self._shared().set("taken", json.dumps({"error": error.document()}))
                raise
            self._shared().set("taken", json.dumps(said))
        elif "error" in (said := json.loads(self._shared().get("taken"))):
            raise from_document(said["error"])
        plan = request.plan
        self._group = WorkerGroup(
            generation=1,
            members=list(range(self.size)),
            rendezvous=TORCHRUN,
            transfers=TORCHRUN if needs_transfers([plan.layout], plan.devices) else "",
            on_devices=sums_on_devices(plan.devices),
            checkpoint=self._coordinator.folder if self._coordinator is not None else None,
            reason="torchrun",
        )
        here = {
            "backend": "torch",
            "cgroups": [None] * devices,
            "sharded": False,
            "started_at_s": time.time(),
        }
        if os.environ.get("GROUP_RANK", "0") != "0":
            said["launch"] = None
        return order.model_copy(update=here | said)

    def _take_over(self, request: TrainRequest, work: Path) -> dict[str, Any]:
        """Hold the right to train the run until `close`. Returns values for all ranks' orders."""
        store, policy = request.store(), request.job.train.checkpoint
        ledger, name, uri = (
            Ledger(request.settings.ledger_url),
            own_name(),
            request.run_uri or store.uri,
        )
        holds, run = [resource(uri)], None
        with contextlib.suppress(BadInput):  # the folder is not a run of a store
            run = Run(uri, request.settings)
            holds.append(run.hold)
        ledger.take(holds, Holder(name, os.getpid()), uri)
        self._held.callback(ledger.release, uri, holds, holder=name)
        beat = self._held.enter_context(Heartbeat(ledger, uri, holds, holder=name))
        if run is not None and run.has(Status) and not run.finished():
            run.note(state="running", step="train", error=None)
        if request.resume:
            recover(store, work, policy)

        def require_mine() -> None:
            if not beat.mine():
                raise RunHeld(
                    "another process took over the right to train this run; stored checkpoints stay"
                )

        right = fence.claim(store, None)
        state = rewind(right, work, resume=request.resume)
        staged.prepare(work)
        self._uploader = Uploader(
            request.store,
            staged.StagingArea(work, right.owner),
            policy,
            stored=state.step if state is not None else 0,
            require_mine=require_mine,
            report=self.send,
        )
        self._held.callback(self._forget)
        self._held.enter_context(self._uploader)
        self._coordinator = Coordinator(
            self._uploader,
            [device.id for device in request.plan.devices],
            policy,
            token=None,
            stop=threading.Event(),
            patience_s=request.store_patience_s,
        )
        self._coordinator.begin(1, range(self.size))
        threading.Thread(target=self._gather, args=(work,), name="gather", daemon=True).start()
        return {"launch": right.owner, "earlier_s": state.duration_s if state else 0.0}

    def _forget(self) -> None:
        if self._uploader is not None and self._uploader.has_all:
            self._uploader.area.forget()

    def _gather(self, work: Path) -> None:
        """Rank 0's thread: collects the other ranks' parts of each checkpoint."""
        store = self._shared()
        while True:
            generation, step = self._awaited.get()
            for number in range(1, self.size):
                key = _part_key(number, generation, step)
                while not store.check([key]):
                    time.sleep(_LOOK_S)
                for rows in json.loads(store.get(key)):
                    TransferServer(work, None, number).note(**rows)
                store.delete_key(key)
                assert self._coordinator is not None
                self._coordinator.part(number, self, generation=generation, step=step, paths=[])
            self._awaited.task_done()

    def close(self) -> None:
        """Release the run."""
        self._held.close()

    def attend(self, peers: PeerStatus, rank: RankStatus | None = None) -> None:
        return

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "part":
            self._part(fields)
        elif kind == JOURNAL:
            self._rows.append(fields)
        elif kind == "release":
            self.released(fields["step"], fields["stored"])
        elif kind == "answer":
            self._answers.put(fields)
        else:
            self._done |= kind == "done"
            with self._sending:
                sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
                sys.stdout.flush()

    def _part(self, fields: Message) -> None:
        begun = fields["generation"], fields["step"]
        if self._coordinator is None:
            rows, self._rows = self._rows, []
            self._shared().set(_part_key(self.number, *begun), json.dumps(rows))
            return
        self._coordinator.check()
        self._coordinator.part(0, self, **fields)
        self._awaited.put(begun)

    def receive(self, *kinds: str) -> Message:
        if self._group is not None:
            group, self._group = self._group, None
            return {"kind": "join", **group.model_dump()}
        if not self._done:
            raise TrainingFailed(
                "other ranks were lost; torchrun --max-restarts restarts all ranks "
                "from the newest checkpoint"
            )
        if self._uploader is not None and self._coordinator is not None:
            self._awaited.join()
            self._coordinator.settle()
        return {"kind": "exit"}

    def ask(self, about: str, **fields: Any) -> Message:
        if self._coordinator is None:
            self._rows.clear()  # these steps are repeated
            return {}
        self._coordinator.check()
        if about == "settled":
            self._awaited.join()
        self._coordinator.answer(self, about, 0, **fields)
        return self._answers.get()

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last > _LEAST_PAUSE_S

    def progress(self, kind: str, **fields: Any) -> None:
        if self.due:
            self._last = time.monotonic()
            self.send(kind, **fields)

    def _shared(self) -> Any:
        if self._store is None:
            self._store = torchrun_store("parts")
        return self._store


def _part_key(number: int, generation: int, step: int) -> str:
    return f"part-{generation}-{step}-{number}"
