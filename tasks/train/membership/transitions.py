"""How each event changes the membership's state, and its immediate instructions.

A transition that ends the training raises the error with which it ends.
"""

from __future__ import annotations

from functools import singledispatch

from trainwright.tasks.errors import Interrupted, RunHeld, TrainingFailed
from trainwright.tasks.train.membership import event, instruction, next_group, watchdog
from trainwright.tasks.train.membership.state import MembershipState, RankState

STOP_GRACE_S = 3.0
"""How long ranks may take to finish the current step after a request to stop."""
SAVE_GRACE_S = 30.0
"""Additional time if the last checkpoint is being written."""


@singledispatch
def apply(one: event.MembershipEvent, state: MembershipState) -> None:
    """Apply an event to the state."""
    raise TypeError(one)


# -- of ranks --------------------------------------------------------------------------------------


@apply.register
def _(heartbeat: event.RankHeartbeat, state: MembershipState) -> None:
    rank = state.ranks[heartbeat.number]
    rank.waits_s, rank.computes_s = heartbeat.waits_s, heartbeat.computes_s
    rank.writing = heartbeat.writing


@apply.register
def _(ready: event.RankReady, state: MembershipState) -> None:
    rank = state.ranks[ready.number]
    just_loaded = rank.status == "starting"
    rank.become("ready")
    rank.step = ready.step
    if just_loaded:
        state.instruct(instruction.AnnounceLoaded(rank.number))
        if state.generation:
            state.reasons.append(f"{state.name(rank.number)} is back")
    elif not rank.done and state.leaving_since is None:
        _abort(state)  # the rank's sums have failed
    state.fruitless.sum_error = state.fruitless.sum_error or ready.sum_error
    if ready.shortage is not None:
        if ready.shortage.layer:
            _sum_layer(state, rank.number, ready.shortage.layer)
        else:
            _limit_batch(state, rank.number, ready.shortage)
        _abort(state)


@apply.register
def _(joined: event.RankJoined, state: MembershipState) -> None:
    state.ranks[joined.number].status = "joined"


@apply.register
def _(done: event.RankDone, state: MembershipState) -> None:
    rank = state.ranks[done.number]
    rank.done, rank.done_step = True, done.step


@apply.register
def _(failed: event.RankFailed, state: MembershipState) -> None:
    rank = state.ranks[failed.number]
    rank.failure = rank.failure or failed
    if failed.final:
        raise rank.failure.error


@apply.register
def _(ended: event.ProcessEnded, state: MembershipState) -> None:
    rank = state.ranks.pop(ended.number)
    if state.stop_asked_at is not None and state.policy.searches:
        raise Interrupted("stopped during the learning-rate search")
    if rank.number in state.given_back:
        state.given_back.discard(rank.number)
    else:
        _note_death(state, rank, ended)
    if rank.number in state.members and rank.status != "ready":
        _abort(state)


def _note_death(state: MembershipState, rank: RankState, ended: event.ProcessEnded) -> None:
    """Count the end of a process, and conclude what it says. Raises what ends the training."""
    name, how = state.name(rank.number), ended.how
    if rank.failure is not None:
        _raise_if_it_would_repeat(state, rank, rank.failure)
        how = f"failed ({rank.failure.message})"
        state.last_cause = rank.failure.error
    else:
        said = f"{name} {how}; its log is {ended.log}"
        state.last_cause = TrainingFailed(said, rank=rank.number)
    state.restarts.died(rank.number)
    state.reasons.append(f"{name} {how}")
    batch, short = state.split[rank.number], ended.out_of_memory and rank.status == "joined"
    if short and ended.stage:
        said = f"{name} {how}: {ended.stage}; its log is {ended.log}"
        raise TrainingFailed(said, rank=rank.number)
    if short and batch > 0:
        _limit_batch(state, rank.number, event.MemoryShortage(batch))


def _raise_if_it_would_repeat(
    state: MembershipState, rank: RankState, failed: event.RankFailed
) -> None:
    """Raise an error of wrong input, from outside a group, or repeated at the same step."""
    error = failed.error
    final = error.exit_code != TrainingFailed.exit_code or error.details.get("final")
    if final or state.policy.searches or not rank.in_group or state.restarts.repeats(failed.step):
        raise error


def _limit_batch(state: MembershipState, number: int, shortage: event.MemoryShortage) -> None:
    """Limit the batch of a device that ran out of memory."""
    predicted = None
    if shortage.memory_bytes is not None:
        predicted = state.devices[number].largest_batch(shortage.memory_bytes)
    limit = state.capacity.limit(number, shortage, predicted)
    said = f"{state.name(number)} ran out of memory with a batch of {shortage.batch_size}"
    said += f"; its batch is now limited to {limit}" if limit else "; not even one sample fits"
    state.reasons.append(said)
    state.last_cause = TrainingFailed(said, rank=number)


def _sum_layer(state: MembershipState, number: int, layer: str) -> None:
    """Let a layer be summed, as a device's memory does not hold the rows of all ranks in it.

    Raises TrainingFailed if the job does not permit that.
    """
    said = (
        f"{state.name(number)} ran out of memory in layer {layer}, for which it works on the rows "
        "of all ranks"
    )
    if not state.policy.may_sum:
        kept = f"; the checkpoint of step {state.committed} is kept" if state.committed else ""
        raise TrainingFailed(
            f"{said}, and train.layout permits no other way; use a smaller train.global_batch_size "
            f"or leave train.layout to the planner{kept}",
            rank=number,
            layer=layer,
        )
    if layer not in state.summed:
        state.summed.append(layer)
    said += "; its gradients are summed from now on"
    state.reasons.append(said)
    state.last_cause = TrainingFailed(said, rank=number)


def _abort(state: MembershipState) -> None:
    """Make all ranks leave the current group at once, because it is broken."""
    if state.aborted_at is None and state.members:
        state.aborted_at = state.now
        if inside := tuple(rank.number for rank in state.inside()):
            state.instruct(instruction.AbortGroup(inside, state.generation))


# -- of processes and hosts ------------------------------------------------------------------------


@apply.register
def _(loaded: event.SpareLoaded, state: MembershipState) -> None:
    state.spare = "loaded"


@apply.register
def _(ended: event.SpareEnded, state: MembershipState) -> None:
    state.spare = "none"
    state.lost_spares += 1


@apply.register
def _(lost: event.HostsLost, state: MembershipState) -> None:
    state.unreachable |= lost.numbers
    state.ending -= lost.numbers


@apply.register
def _(ending: event.HostsEnding, state: MembershipState) -> None:
    state.ending |= ending.numbers - state.unreachable


@apply.register
def _(returned: event.HostsReturned, state: MembershipState) -> None:
    state.unreachable -= returned.numbers


# -- of checkpoints and the split ------------------------------------------------------------------


@apply.register
def _(begun: event.LastCheckpointBegun, state: MembershipState) -> None:
    state.saving = True


@apply.register
def _(stored: event.CheckpointStored, state: MembershipState) -> None:
    state.committed = max(state.committed, stored.step)
    state.restarts.reached_checkpoint(state.members)


@apply.register
def _(restored: event.CheckpointRestored, state: MembershipState) -> None:
    state.checkpoint, state.committed = restored.folder, restored.step
    state.restore = "done"


@apply.register
def _(back: event.RolledBack, state: MembershipState) -> None:
    state.committed = back.step
    state.step_at_start = min(back.step, state.step_at_start)


@apply.register
def _(changed: event.SplitChanged, state: MembershipState) -> None:
    state.split = changed.batch_sizes


@apply.register
def _(planned: event.LayoutPlanned, state: MembershipState) -> None:
    """Let the members form their group again; one of other members gets its layout anyway."""
    same = list(planned.members) == state.members == [rank.number for rank in state.inside()]
    if same and state.stop_asked_at is None and next_group.may_leave(state):
        state.reasons.append(planned.reason)
        next_group.ask_to_leave(state)


@apply.register
def _(ready: event.LayoutReady, state: MembershipState) -> None:
    if ready.members == state.layout_asked:
        state.layout_known = True


@apply.register
def _(refused: event.NoLayout, state: MembershipState) -> None:
    if refused.members == state.layout_asked:
        state.no_layout = refused.error


# -- of the launch and of time ---------------------------------------------------------------------


@apply.register
def _(asked: event.StopRequested, state: MembershipState) -> None:
    if state.stop_asked_at is not None:
        return
    if state.generation == 0:
        raise stopped_before_a_step(state.committed)
    state.stop_asked_at = asked.now
    if present := tuple(rank.number for rank in state.present()):
        state.instruct(instruction.AskToStop(present))


def stopped_before_a_step(committed: int) -> Interrupted:
    """The error of a launch that was stopped before its first group formed."""
    if committed:
        return Interrupted(
            f"stopped before another step; the checkpoint of step {committed} is kept"
        )
    return Interrupted("stopped before the first step; nothing was changed")


@apply.register
def _(lost: event.LeaseLost, state: MembershipState) -> None:
    raise RunHeld("the lease on the devices was lost while training; the last checkpoint is kept")


@apply.register
def _(tick: event.Tick, state: MembershipState) -> None:
    """Enforce the timeouts of stops and of hung ranks."""
    state.awake_since = tick.awake_since
    if state.stop_asked_at is not None:
        grace_s = STOP_GRACE_S + (SAVE_GRACE_S if state.saving else 0.0)
        if tick.now - max(state.stop_asked_at, tick.awake_since) > grace_s:
            raise Interrupted(
                "stopped; the current step took too long, so the last checkpoint is the one "
                "before it"
            )
    if (
        state.leaving_since is not None
        and tick.now - max(state.leaving_since, tick.awake_since) > watchdog.ABORT_S
        and any(rank.status == "ready" for rank in state.present())
    ):
        _abort(state)  # some ranks have left, but the others do not
    for rank, reason in watchdog.hung(state):
        if not rank.killed:
            rank.killed = True
            state.instruct(instruction.Kill(rank.number, reason))
