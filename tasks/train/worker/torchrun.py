"""A rank that torchrun starts: `torchrun … -m trainwright.tasks.train.worker.entry ORDER.json`.

It has no launcher of ours. Its number and the others come from the environment, sums go by
torch.distributed whatever the order says, and its reports are printed. All ranks form one worker
group. If one is lost, or keeps a sum waiting for the job's `stall_timeout`, all end, and torchrun
starts them again (`--max-restarts`) from the newest checkpoint. Rank 0 holds the right to train the
run meanwhile, as a launcher does, and stops when it loses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
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
from trainwright.tasks.runs.artefacts import Status
from trainwright.tasks.runs.run import Run
from trainwright.tasks.train.channel import Computes, Message, Waits
from trainwright.tasks.train.checkpoint import fence, files
from trainwright.tasks.train.checkpoint.confirmations import Confirmations
from trainwright.tasks.train.checkpoint.spill import recover
from trainwright.tasks.train.exchange.collective import TORCHRUN, torchrun_store
from trainwright.tasks.train.record.journal import FOLDER
from trainwright.tasks.train.record.metrics import drop_from
from trainwright.tasks.train.request import Order, TrainRequest
from trainwright.tasks.train.worker_group import WorkerGroup

_LEAST_PAUSE_S, _LOOK_S = 0.25, 0.05


def is_launcher() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class AloneChannel:
    """Speaks to standard output. What ranks have to know of each other's checkpoints goes through torchrun's store."""

    def __init__(self) -> None:
        self.number, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.leave_asked = self.abort_asked = -1
        self.writing = False
        self._last = 0.0
        self._group: WorkerGroup | None = None
        self._done = False
        self._said: dict[str, Message] = {}
        self._store: Any = None
        self._speaking = threading.Lock()
        self._held = contextlib.ExitStack()
        self._beat: Heartbeat | None = None

    def begin(self, order: Order) -> Order:
        """The order as it reads here, with a claim of our own: that of the launch that left it is another's by now.

        Raises BadInput where torchrun has started more or fewer ranks, RunHeld where another trains the run or holds it.
        """
        request = order.request
        if self.size != (devices := len(request.plan.devices)):
            raise BadInput(
                f"WORLD_SIZE: got {self.size}; allowed: {devices}, as many as the plan has devices"
            )
        folder, work = None, Path(request.work_folder)
        if self.number == 0:
            try:
                folder, said = self._take_over(request)
            except TrainwrightError as error:
                self._shared().set("claim", json.dumps({"error": error.document()}))
                raise
            self._shared().set("claim", json.dumps(said))
        elif "error" in (said := json.loads(self._shared().get("claim"))):
            raise from_document(said["error"])
        (work / FOLDER / f"steps-rank{self.number}.jsonl").unlink(missing_ok=True)
        self._group = WorkerGroup(
            generation=1,
            members=list(range(self.size)),
            rendezvous=TORCHRUN,
            checkpoint=folder,
            reason="torchrun",
        )
        here = {
            "backend": "torch",
            "cgroups": [None] * devices,
            "lease_token": None,
            "keeps": False,
            "started_at_s": time.time(),
        }
        return order.model_copy(update=here | said)

    def _take_over(self, request: TrainRequest) -> tuple[str | None, dict[str, Any]]:
        """Become the one who trains the run, until `close`; its checkpoint's folder, and what all ranks' orders are to say."""
        store, folder = request.store(), Path(request.work_folder) / "resume"
        ledger, name, uri = (
            Ledger(request.settings.ledger_url),
            own_name(),
            request.run_uri or store.uri,
        )
        holds, run = [resource(uri)], None
        with contextlib.suppress(BadInput):  # a folder that is no run of a store
            run = Run(uri, request.settings)
            holds.append(run.hold)
        ledger.take(holds, Holder(name, os.getpid()), uri)
        self._held.callback(ledger.release, uri, holds, holder=name)
        self._beat = self._held.enter_context(Heartbeat(ledger, uri, holds, holder=name))
        if run is not None and run.has(Status) and not run.finished():
            run.note(state="running", step="train", error=None)
        if request.resume:
            recover(
                store, Path(request.work_folder), request.job.train.checkpoint
            )  # what waited here for the store
        right = fence.claim(store, None)
        state = files.fetch_latest(store, folder) if request.resume else None
        right.forget(after=state.step if state is not None else -1)
        drop_from(store, state.step if state is not None else 0)
        earlier_s = state.duration_s if state is not None else 0.0
        return str(folder) if state is not None else None, {
            "claim": right.owner,
            "earlier_s": earlier_s,
        }

    def close(self) -> None:
        """Give the run up."""
        self._held.close()

    def attend(self, peers: Waits, rank: Computes | None = None) -> None:
        return

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "part":
            key = f"{fields['generation']}-{fields['step']}"
            self._said[key] = {**self._said.get(key, {}), **fields}
            self._shared().set(f"{key}-{self.number}", json.dumps(self._said[key]))
            return
        self._done |= kind == "done"
        with self._speaking:
            sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
            sys.stdout.flush()

    def receive(self, *kinds: str) -> Message:
        if self._group is not None:
            group, self._group = self._group, None
            return {"kind": "join", **group.model_dump()}
        if self._done:
            return {"kind": "exit"}
        raise TrainingFailed(
            "other ranks were lost; torchrun --max-restarts goes on from the newest checkpoint"
        )

    def ask(self, about: str, **fields: Any) -> Message:
        if about == "parts":
            while (found := self._confirmations(**fields).answer()) is None:
                time.sleep(_LOOK_S)
            return found
        if about == "write" and self._beat is not None and not self._beat.mine():
            raise RunHeld("the right to train this run was taken away; what it has stored stays")
        return self._confirmations(**fields).known(fields["step"]) if about == "stored" else {}

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last > _LEAST_PAUSE_S

    def progress(self, kind: str, **fields: Any) -> None:
        if self.due:
            self._last = time.monotonic()
            self.send(kind, **fields)

    def _confirmations(self, step: int, generation: int) -> Confirmations:
        """What all ranks have said of a checkpoint until now."""
        found, store = Confirmations(range(self.size)), self._shared()
        for number in range(self.size):
            key = f"{generation}-{step}-{number}"
            if store.check([key]):
                found.note(number, json.loads(store.get(key)))
        found.ask(step)
        return found

    def _shared(self) -> Any:
        if self._store is None:
            self._store = torchrun_store("parts")
        return self._store
