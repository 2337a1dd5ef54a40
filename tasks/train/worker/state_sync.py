"""Gives all members of a worker group the same state, without losing a finished step.

The member with the most finished steps sends parameters, buffers, optimizer and
`CheckpointState` to all.
Members may differ by one step: a rank may die after some members have received the last sum of a
step, while others still wait for it. Those that have the step's gradients end it too: the stages of
pipelines hold unlike parts of the newest state. If no member has a state, the first reads the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import from_document
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.training_result import GroupAverage
from trainwright.tasks.train.batch.sampling import samples_after, shares
from trainwright.tasks.train.channel import busy_with_store
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.checkpoint.checkpoint_transfer import fetch_checkpoint
from trainwright.tasks.train.checkpoint.local_checkpoint import LocalCheckpoint
from trainwright.tasks.train.exchange.collective import take_document
from trainwright.tasks.train.layouts.row_state import move_rows
from trainwright.tasks.train.rank.step_sums import FinishedStep

if TYPE_CHECKING:
    from trainwright.tasks.train.worker.loop import Training
    from trainwright.tasks.train.worker_group import WorkerGroup


def agree(training: Training, group: WorkerGroup) -> None:
    """Take the state of the member with the most steps, and complete the journals up to it."""
    rank, peers, state = training.rank, training.rank.collective, training.state
    training.saver.join(group)
    training.steps.cut()  # before the first member lets the launcher align all journals
    if rank.may_end_step and training.generation != group.generation - 1:
        rank.drop_step()  # a group formed without this rank: the others may have gone back
    training.generation = group.generation
    if training.rows_taken is not None and training.rows_taken[0] == group.generation - 1:
        training.rows_taken = group.generation, training.rows_taken[1]
    # Each member fills its own slot with its finished steps + 1 (0: no state), so the sum is the
    # list of all members' counts. Beside them are the averages so far: at equal steps, only some
    # members may have received the last one; and whether it can end one more step.
    averaging = training.rank.averaging
    finished = torch.zeros(peers.size, 3, dtype=torch.float64)
    if state is not None:
        finished[peers.rank, 0] = state.step + 1
        finished[peers.rank, 1] = averaging.averages if averaging is not None else 0
        finished[peers.rank, 2] = rank.may_end_step
    counts = peers.sum_(finished, "finished").tolist()
    newest = max(one[:2] for one in counts)
    source, back = next(n for n, one in enumerate(counts) if one[:2] == newest), False
    _end_steps(training, counts, source)
    own, state = counts[peers.rank], training.state
    if newest[0] == 0:
        folder = _here(training, group.checkpoint) if rank.first else None
        state, source = begin(training, group.members, _layout_in(training, group), folder), 0
    else:
        follows, whole = _layouts_of(training, group, source)
        holds, step = whole and own[0] == newest[0], int(newest[0]) - 1
        if rank.sharded_layers and not holds:
            training.state = None  # it will have newer rows beside its other parameters
        has_rows = holds or (whole and training.rows_taken == (group.generation, step))
        back = not move_rows(rank, source, rank.cuts_in(follows, group.members), holds=has_rows)
        training.rows_taken = None if back else (group.generation, step)
        if back:
            state, source = _without_lost_rows(training, group), 0
        else:
            rank.join_squares(holds=holds)
            _average(training, group, source, counts)
    take_all(training, source, state)
    if back:
        training.committed = training.saved
    training.redo |= group.broken and training.saved > training.committed


def _end_steps(training: Training, counts: list[list[float]], source: int) -> None:
    """Let members end the step that the rank `source` has ended, if they have its gradients.

    `counts`: as of `agree`; then of the state after that.
    """
    rank, state = training.rank, training.state
    newest = counts[source][0]
    lacking = [n for n, one in enumerate(counts) if one[2] and one[0] == newest - 1]
    if lacking:
        document = {}
        if rank.collective.rank == source and state is not None and rank.finished_step is not None:
            state.adaptive = training.batch.document()
            document = {
                "finished": rank.finished_step.model_dump(),
                "state": asdict(state),
                "last": training.last,
            }
        document = take_document(rank.collective, document, "ended", source)
        for number in lacking if document else []:
            counts[number][0] = newest
        if document and rank.collective.rank in lacking:
            rank.end_step(FinishedStep.model_validate(document["finished"]))
            training.state = files.CheckpointState(**document["state"])
            training.last = document["last"]
    if rank.may_end_step:
        rank.drop_step()


def _layouts_of(training: Training, group: WorkerGroup, source: int) -> tuple[Layout, bool]:
    """Adopt the layout in which a rank has the newest state. Returns the group's own.

    And whether this rank's rows are of that layout, or it has all. Processes that have just started
    are in the plan's layout. Rows that a rank has of another layout don't count.
    """
    rank, state = training.rank, training.state
    documents: list[Any] = []
    if rank.collective.rank == source and state is not None:
        layouts = rank.layout, training.batch.layout(state, group)
        documents = [one.model_dump(mode="json", exclude_none=True) for one in layouts]
    documents = take_document(rank.collective, documents, "layouts", source)
    layout, follows = (Layout.model_validate(one) for one in documents)
    whole = layout == rank.layout or not rank.is_cut
    if not whole:
        training.state = None
        rank.hold_nothing()
    rank.adopt(layout)
    return follows, whole


def _layout_in(training: Training, group: WorkerGroup) -> Callable[[files.CheckpointState], Layout]:
    return lambda state: training.batch.layout(state, group)


def _without_lost_rows(training: Training, group: WorkerGroup) -> files.CheckpointState | None:
    """Go back to the newest checkpoint: a rank is gone with rows that no other has."""
    rank = training.rank
    if rank.first:
        message = "rows of sharded layers were lost with a rank; training goes back to a checkpoint"
        training.channel.send("notice", message=message)
    return return_to_checkpoint(training, group.members, _layout_in(training, group))


def return_to_checkpoint(
    training: Training,
    members: Sequence[int],
    layout_of: Callable[[files.CheckpointState], Layout],
) -> files.CheckpointState | None:
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
    state = begin(training, members, layout_of, go_back(training) if rank.first else None)
    if state is not None:
        training.channel.send("back", step=state.step)
    return state


def _average(
    training: Training, group: WorkerGroup, source: int, counts: Sequence[Sequence[float]]
) -> None:
    """Average what the members have done alone since the last average, each by its samples.

    `counts`: by member, its finished steps + 1, and its averages. An average that was under way
    when the group broke is thus done here; a member that has not done all averages adds nothing.
    Ranks that train alone update their parameters in a step before they agree on it: if the group
    breaks in between, these updates count, and they do that step again. In joint steps, a member
    that lacks the last step's update adds nothing.
    """
    rank, averaging = training.rank, training.rank.averaging
    if averaging is None:
        return
    peers, own, newest = rank.collective, counts[rank.collective.rank], counts[source]
    shapes = rank.optimizer_shapes()
    rank.expect_optimizer(take_document(peers, shapes, "averaged", source))
    holds = own[0] > 0 and own[1] == newest[1] and (rank.alone or own[0] == newest[0])
    done, after = torch.zeros(2, peers.size, dtype=torch.float64), averaging.since_step
    done[0, peers.rank] = holds
    done[1, peers.rank] = averaging.unfinished if holds and own[0] == newest[0] else 0
    holders, updates = peers.sum_(done, "averages").tolist()
    if averaging.average(moments=True, holds=holds):
        numbers = group.members
        training.batch.averaged = GroupAverage(
            by=[numbers[member] for member, held in enumerate(holders) if held],
            after=after,
            unfinished={numbers[member]: int(one) for member, one in enumerate(updates) if one},
        )


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


def begin(
    training: Training,
    members: Sequence[int],
    layout_of: Callable[[files.CheckpointState], Layout],
    folder: str | None,
) -> files.CheckpointState | None:
    """Start from the checkpoint in the first member's folder, or at step 0, in a layout.

    Returns the first member's state. The others have none until they take it: if the first is lost
    before, they must not count as ranks that finished no step. Of the stages of pipelines and of
    sharded layers, each rank gets what it holds among the members.
    """
    rank, plan = training.rank, training.rank.request.plan
    checkpoint = LocalCheckpoint(Path(folder)) if folder is not None else None
    state = files.CheckpointState(step=0, epoch=0, samples=0, split=plan.shares)
    if checkpoint is not None:
        state = checkpoint.state
    document = dict[str, Any]()
    if rank.first:
        layout = layout_of(state).model_dump(mode="json", exclude_none=True)
        document = {"layout": layout, "resumes": checkpoint is not None}
    document = take_document(rank.collective, document, "begin", 0)
    if rank.is_cut:
        rank.hold_nothing()
    # Members may come from groups with unlike layouts.
    rank.adopt(Layout.model_validate(document["layout"]))
    training.state = training.last = training.rows_taken = rank.finished_step = None
    training.saved, training.best_at, training.redo = 0, 0, False
    training.batch.averaged = None
    if not document["resumes"]:
        rank.begin_anew(members)
        rank.adapt()
        training.batch.take_up({})
        return state if rank.first else None
    rank.resume(checkpoint, members)
    if not rank.first:
        training.batch.take_up({})
        return None
    if state.samples < 0:  # an old checkpoint: the batch never changed then
        state.samples = samples_after(state.step, training.rows, sum(state.split))
    training.batch.take_up(state.adaptive)
    if len(state.split) != len(training.batch.weights):
        # written with another plan's devices: `enter` splits the same batch among this plan's
        state.split, state.members = shares(sum(state.split), plan.shares), []
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
            "finished": rank.finished_step and rank.finished_step.model_dump(),
            "saved": training.saved,
            "best_at": training.best_at,
            "redo": training.redo,
            "averaged": training.batch.averaged and training.batch.averaged.model_dump(mode="json"),
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
    averaged, finished = sent["averaged"], sent["finished"]
    rank.finished_step = FinishedStep.model_validate(finished) if finished else None
    training.batch.averaged = GroupAverage.model_validate(averaged) if averaged else None
    training.saved, training.best_at, training.redo = sent["saved"], sent["best_at"], sent["redo"]
