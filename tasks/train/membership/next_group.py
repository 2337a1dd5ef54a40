"""Decides which group the ranks form next and when, or why the training ends."""

from __future__ import annotations

from trainwright.tasks.errors import (
    Infeasible,
    Interrupted,
    Preempted,
    TrainingFailed,
    TrainwrightError,
)
from trainwright.tasks.train.membership import instruction
from trainwright.tasks.train.membership.state import MembershipState
from trainwright.tasks.train.worker_group import WorkerGroup


def admit(state: MembershipState) -> None:
    """Ask all to leave their group between two steps if another rank is ready to join them."""
    if may_leave(state) and set(state.capacity.usable(state.ready())) - set(state.members):
        ask_to_leave(state)


def make_way(state: MembershipState) -> None:
    """Give back the hosts that a cluster is about to take.

    Asks all to leave their group between two steps; when they have, the others go on. If they are
    too few, or would lose steps, all save a last checkpoint. Raises Preempted if there is no state
    to save.
    """
    going = state.ending & set(state.ranks)
    if not going:
        return
    if state.inside() and not state.policy.searches:
        if may_leave(state) and going & set(state.members):
            ask_to_leave(state)
        return
    ready = state.ready() if state.generation else list(state.ranks)
    staying = [number for number in state.capacity.usable(ready) if number not in going]
    enough = state.policy.whole and state.capacity.shortage(staying) is None
    with_state = [number for number in state.ready() if state.ranks[number].step is not None]
    if enough or state.policy.searches:
        _give_back(state, going)
        return
    names = ", ".join(state.name(number) for number in sorted(going))
    why = f"the cluster takes back the host of {names}"
    if not with_state:
        kept = "; the last checkpoint is kept" if state.committed else ""
        raise Preempted(f"{why}{kept}")
    if not state.makes_way:
        state.giving_up, state.makes_way = why, True
        _start(state, with_state, end=True)


def _give_back(state: MembershipState, numbers: set[int]) -> None:
    """Go on without these devices, whose processes end with their hosts."""
    state.instruct(instruction.GiveBack(tuple(sorted(numbers))))
    state.unreachable |= numbers
    state.ending -= numbers
    state.given_back |= numbers
    for number in sorted(numbers):
        state.reasons.append(f"{state.name(number)} was given back to the cluster")


def may_leave(state: MembershipState) -> bool:
    """Whether all members train, so that they can be asked to leave between two steps."""
    inside = state.inside()
    ends = state.leaving_since is not None or state.aborted_at is not None
    if state.policy.searches or state.giving_up is not None or ends or not inside:
        return False
    return not any(rank.status == "joining" or rank.done for rank in inside)


def ask_to_leave(state: MembershipState) -> None:
    """Ask all members to leave their group between two steps."""
    state.leaving_since = state.now
    numbers = tuple(rank.number for rank in state.inside())
    state.instruct(instruction.AskToLeave(numbers, state.generation))


def form(state: MembershipState) -> None:
    """Form a group of the ready ranks once the last group is empty.

    Raises Interrupted or TrainingFailed if no group can form and no rank is expected.
    """
    if state.inside():
        return
    there = [number for number in state.ready() if number not in state.unreachable]
    ready, loading = state.capacity.usable(there), bool(state.loading())
    with_state = [number for number in ready if state.ranks[number].step is not None]
    if state.stop_asked_at is not None:
        _form_to_stop(state, ready, with_state)
    elif loading and (state.generation == 0 or state.policy.searches):
        return
    elif (shortage := state.capacity.shortage(ready) or _refusal(state, ready)) is None:
        if _has_layout(state, ready):
            state.short_since = state.giving_up = None
            state.makes_way = False
            _form_to_train(state, ready)
    elif not _wait_for_more(state, shortage, loading=loading):
        if (refused := state.no_layout) is not None and _refusal(state, ready):
            raise _infeasible(state, refused)
        if not with_state:
            unkept = state.policy.searches or not state.committed
            kept = "" if unkept else "; the last checkpoint is kept"
            raise TrainingFailed(f"{state.giving_up}{kept}", **state.most_batch_sizes)
        _start(state, with_state, end=True)


def _form_to_stop(state: MembershipState, ready: list[int], with_state: list[int]) -> None:
    if state.policy.searches:
        raise Interrupted("stopped during the learning-rate search")
    if not with_state:
        raise Interrupted("stopped while ranks were being replaced; the last checkpoint is kept")
    _start(state, ready, end=True)
    state.instruct(instruction.AskToStop(tuple(ready)))


def _has_layout(state: MembershipState, members: list[int]) -> bool:
    """Whether the layout of these members is known; asks for it if it is not.

    All devices have the plan's. Without stages, members always divide the plan's among themselves.
    """
    if not state.policy.staged or len(members) == len(state.devices):
        return True
    if state.layout_asked != tuple(members):
        state.layout_asked, state.layout_known, state.no_layout = tuple(members), False, None
        state.instruct(instruction.PlanLayout(state.layout_asked))
    return state.layout_known


def _refusal(state: MembershipState, members: list[int]) -> str | None:
    """Why no layout fits these members; None if one does, or none is known to be refused."""
    refused = state.no_layout if state.layout_asked == tuple(members) else None
    if refused is None:
        return None
    return f"{len(members)} of {len(state.devices)} devices left, and {refused}"


def _infeasible(state: MembershipState, refused: TrainwrightError) -> Infeasible:
    """The end of a training whose devices that are left hold no layout."""
    kept = f"; the checkpoint of step {state.committed} is kept" if state.committed else ""
    searches = state.policy.searches
    again = "" if searches else f"{kept}: run it again when the devices are back"
    return Infeasible(f"{state.giving_up}{again}", **refused.details)


def _form_to_train(state: MembershipState, ready: list[int]) -> None:
    finished = max(rank.step or 0 for rank in state.ranks.values())
    fruitful = bool(state.reasons) or finished > state.step_at_start
    if state.generation and not state.fruitless.allow_next(
        state.generation, state.now, fruitful=fruitful, kept=state.committed > 0
    ):
        return
    fresh = all(state.ranks[number].step is None for number in ready)
    if fresh and state.generation and not state.policy.searches and state.restore != "done":
        if state.restore == "needed":
            state.restore = "asked"
            state.instruct(instruction.RestoreCheckpoint())
        return
    _start(state, ready, checkpoint=state.checkpoint if fresh else None)


def _wait_for_more(state: MembershipState, shortage: str, *, loading: bool) -> bool:
    """Whether to wait for more ranks; if not, record why the training ends."""
    patience_s = state.policy.wait_s or state.faults.wait_for_devices
    returning = any(state.restarts.allows(number) for number in state.unreachable)
    coming = state.giving_up is None and (loading or returning)
    short_since = state.now if state.short_since is None else state.short_since
    if coming and state.now - short_since < patience_s:
        if state.short_since is None:
            said = f"{shortage}: training waits up to {patience_s:.0f} s for others"
            state.instruct(instruction.Notice(said))
        state.short_since = short_since
        return True
    waited = f" and none came back in {state.now - short_since:.0f} s" if coming else ""
    cause = f" ({state.last_cause})" if state.last_cause is not None else ""
    state.giving_up = f"{shortage}{waited}{cause}"
    if state.capacity.lacks_memory(state.ready()):
        limits = state.capacity.limits.items()
        held = {state.devices[number].id: limit for number, limit in limits}
        state.most_batch_sizes = {"most_batch_sizes": held}
    return False


def _start(
    state: MembershipState,
    members: list[int],
    *,
    end: bool = False,
    checkpoint: str | None = None,
) -> None:
    state.generation += 1
    state.step_at_start = max(state.ranks[number].step or 0 for number in members)
    verb = "begins with" if state.generation == 1 else "continues with"
    limits = {} if end else state.capacity.limits
    group = WorkerGroup(
        generation=state.generation,
        members=members,
        committed=state.committed,
        checkpoint=checkpoint,
        reason="; ".join([*state.reasons, f"{verb} {len(members)} of {len(state.devices)}"]),
        end=end,
        broken=state.aborted_at is not None,
        limits={number: limits[number] for number in members if number in limits},
        summed=list(state.summed),
    )
    state.instruct(instruction.FormGroup(group))
    state.members, state.reasons = members, []
    state.aborted_at = state.leaving_since = None
    state.saving, state.restore = False, "needed"
    state.layout_asked, state.layout_known, state.no_layout = (), False, None
    state.first_formed_at = state.first_formed_at or state.now
    for number in members:
        rank = state.ranks[number]
        rank.become("joining")
        rank.done = False
