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
    rank, peers, state = training.rank, training.rank.collective, training.state
    training.saver.join(group)
    training.steps.cut()  # before the first member lets the launcher align all journals
    # Each member fills its own slot with its finished steps + 1 (0: no state), so the sum is the
    # list of all members' counts. Beside them are the averages so far: at equal steps, only some
    # members may have received the last one.
    averaging = training.rank.averaging
    finished = torch.zeros(peers.size, 2, dtype=torch.float64)
    if state is not None:
        finished[peers.rank, 0] = state.step + 1
        finished[peers.rank, 1] = averaging.averages if averaging is not None else 0
    counts = peers.sum_(finished, "finished").tolist()
    own, newest = counts[peers.rank], max(counts)
    source, back = counts.index(newest), False
    if newest[0] == 0:
        state, source = begin(training, _here(training, group.checkpoint)), 0
    else:
        holds = own[0] == newest[0]
        if rank.rows_of_layers() and not holds:
            training.state = None  # it will have newer rows beside its other parameters
        back = not hold_all_rows(rank, source, holds=holds)
        if back:
            state, source = _without_lost_rows(training), 0
        else:
            rank.join_squares(holds=holds)
            _average(training, source, holds=own[0] > 0 and own[1] == newest[1])
    take_all(training, source, state)
    if back:
        training.committed = training.saved
    training.redo |= group.broken and training.saved > training.committed


def _without_lost_rows(training: Training) -> files.CheckpointState | None:
    """Go back to the newest checkpoint: a rank is gone with rows that no other has."""
    rank = training.rank
    if rank.first:
        message = "rows of sharded layers were lost with a rank; training goes back to a checkpoint"
        training.channel.send("notice", message=message)
    return return_to_checkpoint(training)


def return_to_checkpoint(training: Training) -> files.CheckpointState | None:
    """Let all members return to the newest checkpoint; the result is the first member's state.

    Raises the launcher's error.
    """
    rank = training.rank
    training.steps.cut()
    if training.writer is not None:  # the next one begins at the checkpoint's step
        training.writer.close()
        training.writer = None
    training.saver.settle()
    # A barrier: the launcher may drop checkpoints only when no rank writes one.
    rank.collective.sum_(torch.zeros(1, dtype=torch.float64), "settled")
    state = begin(training, go_back(training) if rank.first else None)
    if state is not None:
        training.channel.send("back", step=state.step)
    return state


def _average(training: Training, source: int, *, holds: bool) -> None:
    """Average what the members have done alone since the last average, each by its samples.

    `holds`: whether this rank has done all averages. An average that was under way when the group
    broke is thus done here. Ranks that train alone update their parameters in a step before they
    agree on it; if the group breaks in between, they do that step again.
    """
    rank = training.rank
    if rank.averaging is None:
        return
    shapes = rank.optimizer_shapes()
    rank.expect_optimizer(take_document(rank.collective, shapes, "averaged", source))
    rank.averaging.average(moments=True, holds=holds)


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


def begin(training: Training, folder: str | None) -> files.CheckpointState | None:
    """Start from the checkpoint in a folder, or at step 0.

    Returns the first member's state. The others have none until they take it: if the first is lost
    before, they must not count as ranks that finished no step.
    """
    rank, plan = training.rank, training.rank.request.plan
    if rank.is_cut:
        rank.hold_all_rows()
    training.state = training.last = None
    training.saved, training.best_at, training.redo = 0, 0, False
    if folder is None or not rank.first:
        rank.begin_anew()
        if folder is None:
            rank.adapt()
        split = [planned.batch_size for planned in plan.devices]
        training.batch.take_up({})
        first = files.CheckpointState(step=0, epoch=0, samples=0, split=split)
        return first if rank.first else None
    state, model, optimizer = files.read_local(Path(folder))
    if state.samples < 0:  # an old checkpoint: the batch never changed then
        state.samples = samples_after(state.step, training.rows, sum(state.split))
    training.batch.take_up(state.adaptive)
    rank.load_state(model)
    rank.load_optimizer_state(optimizer)
    if len(state.split) != len(training.batch.weights):
        # written with another plan's devices: `enter` splits the same batch among this plan's
        planned = [device.batch_size for device in plan.devices]
        state.split, state.members = shares(sum(state.split), planned), []
    training.saved = state.step
    return state


def take_all(training: Training, source: int, state: files.CheckpointState | None) -> None:
    """Take all state that the training continues from, from the rank `source`, whose `state` it is.

    A rank's own state changes when it has all: ranks may be lost meanwhile.
    """
    rank = training.rank
    sent: dict[str, Any] = {}
    if rank.collective.rank == source:
        assert state is not None
        state.adaptive = training.batch.document()
        sent = {
            "state": asdict(state),
            "weights": training.batch.weights,
            "last": training.last,
            "saved": training.saved,
            "best_at": training.best_at,
            "redo": training.redo,
            "optimizer": rank.optimizer_shapes(),
        }
    sent = take_document(rank.collective, sent, "sent", source)
    rank.expect_optimizer(sent["optimizer"])
    taken = files.CheckpointState(**sent["state"])
    if rank.first:  # the others add no row before the next sum, which waits for this rank
        training.channel.ask("align", step=taken.step, last=sent["last"])
    rank.take_state_from_first(source)
    training.state = taken
    training.batch.take_up(taken.adaptive)
    training.batch.weights, training.last = sent["weights"], sent["last"]
    training.saved, training.best_at, training.redo = sent["saved"], sent["best_at"], sent["redo"]
