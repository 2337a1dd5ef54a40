"""Gives all members of a worker group the same state, without losing a finished step.

The member with the most finished steps sends parameters, buffers, optimizer and
`CheckpointState` to all.
Members may differ by one step: a rank may die after some members have received the last sum of a
step, while others still wait for it. If no member has a state, the first reads the checkpoint.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import from_document
from trainwright.tasks.train.batch.sampling import samples_after, shares
from trainwright.tasks.train.channel import busy_with_store
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.checkpoint.checkpoint_transfer import fetch_checkpoint
from trainwright.tasks.train.exchange.collective import take_document
from trainwright.tasks.train.layouts.row_state import hold_all_rows

if TYPE_CHECKING:
    from trainwright.tasks.train.worker.loop import Training
    from trainwright.tasks.train.worker_group import WorkerGroup


def agree(training: Training, group: WorkerGroup) -> None:
    """Take the state of the member with the most steps, and complete the journals up to it."""
    peers, state = training.rank.collective, training.state
    training.steps.cut()  # before the first member lets the launcher align all journals
    # Each member fills its own slot with its finished steps + 1 (0: no state), so the sum is the
    # list of all members' counts.
    finished = torch.zeros(peers.size, dtype=torch.float64)
    finished[peers.rank] = state.step + 1 if state is not None else 0
    counts = peers.sum_(finished, "finished").tolist()
    source = counts.index(max(counts))
    if max(counts) == 0:
        begin(training, _here(training, group.checkpoint))
    elif not hold_all_rows(training.rank, source, holds=finished[peers.rank] == max(counts)):
        # A rank is gone with rows that no other has.
        begin(training, go_back(training) if training.rank.first else None)
        source = 0
    take_all(training, source)
    training.redo |= group.broken and training.saved > group.committed
    training.saver.join(group)


def _here(training: Training, folder: str | None) -> str | None:
    """The checkpoint's folder here. A first rank on another host copies the checkpoint first."""
    if folder is None or training.order.launch is not None or not training.rank.first:
        return folder
    with busy_with_store(training.channel):
        return str(fetch_checkpoint(training.channel, training.work / "resume"))


def go_back(training: Training) -> str | None:
    """Let the launcher return to the newest checkpoint.

    Returns its folder here, None for step 0. Raises the launcher's error.
    """
    with busy_with_store(training.channel):
        answer = training.channel.ask("back")
    if "error" in answer:
        raise from_document(answer["error"])
    return _here(training, answer["checkpoint"])


def begin(training: Training, folder: str | None) -> None:
    """Start from the checkpoint in a folder, or at step 0."""
    rank, plan = training.rank, training.rank.request.plan
    if rank.is_cut:
        rank.hold_all_rows()
    training.last, training.saved, training.best_at, training.redo = None, 0, 0, False
    if folder is None or not rank.first:
        rank.begin_anew()
        if folder is None:
            rank.adapt()
        split = [planned.batch_size for planned in plan.devices]
        training.state = files.CheckpointState(step=0, epoch=0, samples=0, split=split)
        training.batch.take_up({})
        return
    training.state, model, optimizer = files.read_local(Path(folder))
    if training.state.samples < 0:  # an old checkpoint: the batch never changed then
        training.state.samples = samples_after(
            training.state.step, training.rows, sum(training.state.split)
        )
    training.batch.take_up(training.state.adaptive)
    rank.load_state(model)
    rank.load_optimizer_state(optimizer)
    if len(training.state.split) != len(training.batch.weights):
        # written with another plan's devices: `enter` splits the same batch among this plan's
        planned = [device.batch_size for device in plan.devices]
        training.state.split, training.state.members = (
            shares(sum(training.state.split), planned),
            [],
        )
    training.saved = training.state.step


def take_all(training: Training, source: int) -> None:
    """Take all state that the training continues from, from the rank `source`."""
    rank = training.rank
    assert training.state is not None or rank.collective.rank != source
    sent: dict[str, Any] = {}
    if training.state is not None:
        training.state.adaptive = training.batch.document()
        sent = {
            "state": asdict(training.state),
            "weights": training.batch.weights,
            "last": training.last,
            "saved": training.saved,
            "best_at": training.best_at,
            "redo": training.redo,
            "optimizer": rank.optimizer_shapes(),
        }
    sent = take_document(rank.collective, sent, "sent", source)
    training.state = files.CheckpointState(**sent["state"])
    training.batch.take_up(training.state.adaptive)
    training.batch.weights, training.last = sent["weights"], sent["last"]
    training.saved, training.best_at, training.redo = sent["saved"], sent["best_at"], sent["redo"]
    rank.expect_optimizer(sent["optimizer"])
    if rank.first:  # the others add no row before the next sum, which waits for this rank
        training.channel.ask("align", step=training.state.step, last=training.last)
    rank.take_state_from_first(source)
