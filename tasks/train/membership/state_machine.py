"""Decides which ranks train together: a state machine with events in and instructions out.

    a rank dies, hangs, or its sums fail  the others leave the group at once and form a smaller one
    its replacement has loaded            all leave between two steps and form a larger group
    a learning-rate search loses a rank   the others wait for a replacement and search again
    a cluster takes hosts back            all leave between two steps, and others form a group;
                                          if too few would be left, they save a last checkpoint
    too few ranks, or too little memory   they wait for replacements; if none come, they save a last
                                          checkpoint, and the training fails with the cause

It reads no clock and does no I/O: each event carries its time, and timeouts apply at a `Tick`.

    event, instruction   the inputs and outputs
    state                the ranks and their group
    transitions          how an event changes the state
    next_group           which ranks form the next group, and when
    watchdog             which ranks hang
    restarts, capacity   which processes restart; how many devices suffice
"""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.tasks.errors import Preempted, TrainingFailed, TrainwrightError
from trainwright.tasks.train.membership import event, instruction, next_group, transitions
from trainwright.tasks.train.membership.state import MembershipPolicy, MembershipState, RankState

SPARE_AFTER_S = 3.0
"""A spare process starts once the training has lasted this long."""
MOST_SPARES = 10
"""How many unused spare processes may end before no more are started."""


class Membership:
    """The state machine of one launch."""

    def __init__(
        self,
        policy: MembershipPolicy,
        *,
        checkpoint: str | None = None,
        committed: int = 0,
        summed: Sequence[str] = (),
    ) -> None:
        """`checkpoint`: the folder to start from, which holds `committed` steps; None: step 0.

        `summed`: layers that earlier launches had to sum, as memory ran out.
        """
        self._state = MembershipState(policy, checkpoint, committed, summed)

    def handle(self, *events: event.MembershipEvent) -> list[instruction.Instruction]:
        """Apply events. Returns the instructions for the launcher, in order.

        Ignores events of a process that has ended, and all events after the end. The end is an
        instruction to finish or to give up.
        """
        state = self._state
        state.instructions = []
        if state.ended:
            return []
        try:
            for one in events:
                self._note(one)
            self._decide()
        except TrainwrightError as error:
            state.ended = True
            state.instruct(instruction.GiveUp(error))
        return state.instructions

    def _note(self, one: event.MembershipEvent) -> None:
        state = self._state
        state.now = one.now
        if isinstance(one, event.RankEvent):
            if one.number not in state.ranks:
                return
            state.ranks[one.number].heard_at = one.now
        transitions.apply(one, state)

    def _decide(self) -> None:
        """Derive instructions from the state of the ranks."""
        if self._state.all_done():
            _finish(self._state)
            return
        if self._state.stop_asked_at is None and self._state.giving_up is None:
            _start_processes(self._state)
            next_group.make_way(self._state)
        next_group.admit(self._state)
        next_group.form(self._state)


def _finish(state: MembershipState) -> None:
    """End after all members are done. If the training was given up, raises the reason."""
    if state.giving_up is not None:
        step = state.ranks[state.members[0]].done_step
        if state.makes_way:
            raise Preempted(f"{state.giving_up}; the checkpoint of step {step} is kept", step=step)
        again = "" if state.most_batch_sizes else ": run it again to continue from there"
        said = f"{state.giving_up}; the checkpoint of step {step} is kept{again}"
        raise TrainingFailed(said, step=step, **state.most_batch_sizes)
    state.ended = True
    state.instruct(instruction.Finish())


def _start_processes(state: MembershipState) -> None:
    """Start a process for each device that lacks one and may have one, then a spare."""
    for number, device in enumerate(state.devices):
        away = number in state.unreachable or number in state.ending
        gone = away or not state.restarts.allows(number)
        if number in state.ranks or gone:
            continue
        state.ranks[number] = RankState(number, heard_at=state.now)
        # On a busy CPU, a spare that still loads takes longer than a new process.
        if state.spare == "loaded" and device.local:
            state.spare = "none"
            state.instruct(instruction.AssignSpare(number))
        else:
            state.instruct(instruction.StartProcess(number))
    if _needs_spare(state):
        state.spare = "loading"
        state.instruct(instruction.StartSpare())


def _needs_spare(state: MembershipState) -> bool:
    """Whether a spare process is worthwhile and delays no process that is needed now."""
    return (
        state.spare == "none"
        and not state.policy.searches
        and state.first_formed_at is not None
        and state.now - state.first_formed_at > SPARE_AFTER_S
        and not state.loading()
        and state.faults.restarts > 0
        and state.lost_spares < MOST_SPARES
        and any(device.local for device in state.devices)
    )
