"""Ranks that are threads of this process, in one worker group after another, with real messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trainwright.tasks.data import dataset as data
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.exchange.collective import PeersLost
from trainwright.tasks.train.exchange.peers import Peers
from trainwright.tasks.train.rank.rank import Rank
from trainwright.tasks.train.request import Order
from trainwright.tasks.train.worker.loop import Training
from trainwright.tasks.train.worker_group import WorkerGroup

WAIT_S = 60.0


class NoLauncher:
    """A rank's channel without a launcher; the newest checkpoint is the start of the training."""

    due, writing, leave_asked, abort_asked = False, False, -1, -1
    released: Callable[[int, int], None]

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, about: str, **_: Any) -> dict[str, Any]:
        self.asked.append(about)
        return {"checkpoint": None} if about == "back" else {}

    def send(self, kind: str, **_: Any) -> None:
        """Nobody hears it."""

    def progress(self, kind: str, **_: Any) -> None:
        """Nobody hears it."""


class BreakingPeers(Peers):
    """Peers of a rank that is lost in the first sum whose name begins with `breaks_at`."""

    breaks_at = ""

    def sum_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if self.breaks_at and name.startswith(self.breaks_at):
            self.breaks_at = ""
            raise PeersLost("this rank is lost")
        return super().sum_(tensor, name)


class OneAtATime(Rank):
    """A rank that builds its model while no other does: threads share torch's random numbers."""

    lock = threading.Lock()

    def _newly_built(self) -> torch.nn.Module:
        with self.lock:
            return super()._newly_built()


class ThreadRank:
    """A rank with all it needs, in a thread of its own."""

    def __init__(self, asked: TrainRequest, number: int, dataset: Any) -> None:
        self.number, self.asked = number, asked
        self.peers = BreakingPeers("torch")
        self.channel = NoLauncher()
        self.rank = OneAtATime(asked, dataset, self.peers, torch.device("cpu"), number)
        order = Order(request=asked, mode="train", backend="torch", launch="tested", started_at_s=0)
        self.training = Training(self.rank, self.channel, order)
        self.generation = 0

    def join(self, folder: Path, generation: int, members: Sequence[int]) -> None:
        """Enter a group."""
        group = WorkerGroup(
            generation=generation,
            members=list(members),
            committed=0,
            checkpoint=None,
            reason="",
            end=False,
            broken=False,
            limits={},
            rendezvous=str(folder / f"sums-{generation}"),
            transfers=str(folder / f"transfers-{generation}"),
        )
        self.peers.join(group, self.number)
        self.training.enter(group)

    def steps(self, last: int) -> None:
        """Train until this many steps are finished."""
        state = self.training.state
        assert state is not None
        order: Any = None
        while state.step < last:
            epoch, begun = divmod(state.samples, self.training.rows)
            if order is None or epoch != state.epoch:
                state.epoch, order = epoch, self.rank.epoch_order(epoch)
            self.training.step(order, begun)

    def out(self) -> None:
        """Leave the group, as after a sum that failed."""
        self.rank.abandon_step()
        self.peers.leave()


class ThreadRanks:
    """The ranks of a request. Each call acts on all members at once."""

    def __init__(self, asked: TrainRequest, folder: Path) -> None:
        torch.set_num_threads(1)
        dataset = data.load(asked.job.data, asked.job.train.seed)
        self.folder, self._generation = folder, 0
        self.all = [ThreadRank(asked, number, dataset) for number in range(len(asked.plan.devices))]
        self.members: list[int] = []

    def group(self, *members: int) -> list[bool]:
        """All leave their group, and these form another. Returns which of them are in it."""
        self.each(lambda one: one.out())
        self.members, self._generation = list(members), self._generation + 1
        generation = self._generation

        return self.succeed(lambda one: one.join(self.folder, generation, members))

    def succeed(self, act: Callable[[ThreadRank], Any]) -> list[bool]:
        """Let every member act. Those that lose a peer leave their group; which have not?"""

        def tried(one: ThreadRank) -> bool:
            try:
                act(one)
            except PeersLost:
                one.out()
                return False
            return True

        return self.each(tried)

    def each(self, act: Callable[[ThreadRank], Any]) -> list[Any]:
        """Let every member of the group act, and return the results in their order."""
        if not self.members:
            return []
        with ThreadPoolExecutor(len(self.members)) as threads:
            futures = [threads.submit(act, self.all[number]) for number in self.members]
            return [one.result(WAIT_S) for one in futures]

    def steps(self, last: int) -> None:
        """Train until this many steps are finished."""
        self.each(lambda one: one.steps(last))

    def state(self) -> dict[str, torch.Tensor]:
        """The whole model of the first member."""
        found = self.each(lambda one: one.rank.whole_state()[0])
        return {name: value.clone() for name, value in found[0].items()}

    def asked_for(self, about: str) -> bool:
        """Whether a rank asked the launcher for this."""
        return any(about in one.channel.asked for one in self.all)
