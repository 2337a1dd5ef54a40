"""Ranks that are threads of this process, in one worker group after another, with real messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from layout_ranks import OneAtATime, whole_state

from trainwright.tasks.data import dataset as data
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.exchange.collective import PeersLost
from trainwright.tasks.train.exchange.peers import Peers
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
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def ask(self, about: str, **_: Any) -> dict[str, Any]:
        self.asked.append(about)
        return {"checkpoint": None} if about == "back" else {}

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))

    def progress(self, kind: str, **_: Any) -> None:
        """Nobody hears it."""


class BreakingPeers(Peers):
    """Peers of a rank that is lost in the first sum whose name begins with `breaks_at`.

    One that `misses` a sum takes part in it, but the result does not reach it.
    """

    breaks_at = misses = ""

    def sum_(self, tensor: torch.Tensor, name: str, group: Any = None) -> torch.Tensor:
        if self.misses and name.startswith(self.misses):
            self.misses = ""
            super().sum_(tensor.clone(), name, group)
            raise PeersLost("a rank is lost whose part of the sum has reached others only")
        if self.breaks_at and name.startswith(self.breaks_at):
            self.breaks_at = ""
            raise PeersLost("this rank is lost")
        return super().sum_(tensor, name, group)


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

    def join(
        self,
        folder: Path,
        generation: int,
        members: Sequence[int],
        layout: Layout | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        """Enter a group."""
        group = WorkerGroup(
            generation=generation,
            members=list(members),
            committed=0,
            checkpoint=None if checkpoint is None else str(checkpoint),
            reason="",
            layout=layout,
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

    def group(
        self, *members: int, layout: Layout | None = None, checkpoint: Path | None = None
    ) -> list[bool]:
        """All leave their group, and these form another. Returns which of them are in it.

        `layout`: None for the plan's. `checkpoint` is a folder to start from.
        """
        self.each(lambda one: one.out())
        self.members, self._generation = list(members), self._generation + 1
        generation = self._generation

        return self.succeed(
            lambda one: one.join(self.folder, generation, members, layout, checkpoint)
        )

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
        # Products of several OpenMP threads differ in their last digit, and each thread has its own
        # number of those.
        with ThreadPoolExecutor(
            len(self.members), initializer=torch.set_num_threads, initargs=(1,)
        ) as threads:
            futures = [threads.submit(act, self.all[number]) for number in self.members]
            return [one.result(WAIT_S) for one in futures]

    def steps(self, last: int) -> None:
        """Train until this many steps are finished."""
        self.each(lambda one: one.steps(last))

    def state(self) -> dict[str, torch.Tensor]:
        """The whole model of the first member."""
        found = self.each(lambda one: whole_state(one.rank)[0])
        return {name: value.clone() for name, value in found[0].items()}

    def asked_for(self, about: str) -> bool:
        """Whether a rank asked the launcher for this."""
        return any(about in one.channel.asked for one in self.all)
