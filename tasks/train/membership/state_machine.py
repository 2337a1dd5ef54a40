"""Decides which ranks train together: a state machine, events in and instructions out.

    a rank dies, hangs, or its sums fail  the others leave the group at once, and form a smaller one
    its replacement has loaded            all leave between two steps, and form a larger group
    a learning-rate search loses a rank   the others wait for a replacement, and search again
    too few ranks, or too little memory   they wait for replacements; then they write a last
                                          checkpoint, and the training fails with the cause

It reads no clock and does no I/O: each event carries its time, and timeouts are judged at a `Tick`.

    event, instruction   what goes in, and what comes out
    state                what is known of the ranks and of their group
    transitions          what an event changes
    next_group           who forms the next group, and when
    watchdog             which ranks hang
    restarts, capacity   whose process is started again; how many devices are enough
"""

from __future__ import annotations

from trainwright.tasks.errors import TrainingFailed, TrainwrightError
from trainwright.tasks.train.membership import event, instruction, next_group, transitions
from trainwright.tasks.train.membership.state import MembershipPolicy, MembershipState, RankState

SPARE_AFTER_S = 3.0
"""A spare process is started once the training has lasted this long."""
MOST_SPARES = 10
"""So many spare processes may end before a device needed one."""


class Membership:
    """The state machine of one launch."""

    def __init__(
        self, policy: MembershipPolicy, *, checkpoint: str | None = None, committed: int = 0
    ) -> None:
        """`checkpoint`: the folder of the one to start from, of `committed` steps, if any."""
        self._state = MembershipState(policy, checkpoint, committed)

    def handle(self, *events: event.MembershipEvent) -> list[instruction.Instruction]:
        """Take events into account. Returns what the launcher is to do, in this order.

        The events of a process that has ended change nothing, nor does any after the end, which is
        an instruction to finish or to give up.
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
        """What the state of the ranks calls for."""
        if self._state.all_done():
            _finish(self._state)
            return
        if self._state.stop_asked_at is None and self._state.giving_up is None:
            _start_processes(self._state)
        next_group.admit(self._state)
        next_group.form(self._state)


def _finish(state: MembershipState) -> None:
    """End, all members being done. Raises why the training was given up, if it was."""
    if state.giving_up is not None:
        step = state.ranks[state.members[0]].done_step
        again = "" if state.most_batch_sizes else ": run it again to go on from there"
        said = f"{state.giving_up}; the checkpoint of step {step} is kept{again}"
        raise TrainingFailed(said, step=step, **state.most_batch_sizes)
    state.ended = True
    state.instruct(instruction.Finish())


def _start_processes(state: MembershipState) -> None:
    """A process for each device that has none and may have one; then a spare one."""
    for number, device in enumerate(state.devices):
        gone = number in state.unreachable or not state.restarts.allows(number)
        if number in state.ranks or gone:
            continue
        state.ranks[number] = RankState(number, heard_at=state.now)
        # A spare that still loads, while the CPU is busy, takes longer than another process.
        if state.spare == "loaded" and device.local:
            state.spare = "none"
            state.instruct(instruction.AssignSpare(number))
        else:
            state.instruct(instruction.StartProcess(number))
    if _needs_spare(state):
        state.spare = "loading"
        state.instruct(instruction.StartSpare())


def _needs_spare(state: MembershipState) -> bool:
    """Whether a spare process pays, and delays none that is needed now."""
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
