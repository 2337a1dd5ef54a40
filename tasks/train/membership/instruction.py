"""The outputs of the membership state machine: typed values that the launcher carries out."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.tasks.errors import TrainwrightError
from trainwright.tasks.train.worker_group import WorkerGroup


@dataclass(frozen=True)
class StartProcess:
    """Start the process of this device."""

    number: int


@dataclass(frozen=True)
class StartSpare:
    """Start a process that loads its code and waits for a device."""


@dataclass(frozen=True)
class AssignSpare:
    """Assign the spare process to this device."""

    number: int


@dataclass(frozen=True)
class AnnounceLoaded:
    """This device's process has loaded: limit it to its CPU share, and report it."""

    number: int


@dataclass(frozen=True)
class FormGroup:
    """Open a rendezvous, and send the group to its members."""

    group: WorkerGroup


@dataclass(frozen=True)
class AskToLeave:
    """Ask these to leave their group between two steps."""

    numbers: tuple[int, ...]
    generation: int


@dataclass(frozen=True)
class AbortGroup:
    """Make the sums of these fail at once."""

    numbers: tuple[int, ...]
    generation: int


@dataclass(frozen=True)
class AskToStop:
    """Ask these to save a checkpoint after the current step, and end."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Kill:
    """Kill this device's process. The reason is reported when it has ended."""

    number: int
    reason: str


@dataclass(frozen=True)
class GiveBack:
    """Give the hosts of these devices back to their cluster."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class RestoreCheckpoint:
    """Get the newest checkpoint: no rank has the training's state (`CheckpointRestored`)."""


@dataclass(frozen=True)
class PlanLayout:
    """Plan the layout of a group of these members (`LayoutReady` or `NoLayout`)."""

    members: tuple[int, ...]


@dataclass(frozen=True)
class Notice:
    """Show a message to the user."""

    message: str


@dataclass(frozen=True)
class Finish:
    """All members are done."""


@dataclass(frozen=True)
class GiveUp:
    """End the training with this error."""

    error: TrainwrightError


Instruction = (
    StartProcess
    | StartSpare
    | AssignSpare
    | AnnounceLoaded
    | FormGroup
    | AskToLeave
    | AbortGroup
    | AskToStop
    | Kill
    | GiveBack
    | RestoreCheckpoint
    | PlanLayout
    | Notice
    | Finish
    | GiveUp
)
