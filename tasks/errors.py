"""The errors of the steps, each for something a caller handles in its own way.

TrainwrightError              exit code
├── BadInput              2   a job, pool, model or option is wrong
├── DataRejected          1   validation failed: names the expectations
├── TrainingFailed        1   a rank failed, or the loss is not a number
├── CorruptArtefact       1   what the store holds is not what was written
├── RunHeld               1   another process works on this run, measures into this file, or has the devices until queue_timeout
├── BusyMachine           1   the machine did too much else while it was measured
├── MustWait              1   the devices are others': the run keeps its place in the queue (operators defer on it)
├── Infeasible            3   no plan meets the limits: which, and the nearest that does
├── ServiceUnreachable    4   a service does not answer: which, where, how to start it
├── Unauthorized          1   the service does not know who asks
├── Forbidden             1   it does, but they may not
└── Interrupted         130   stopped by a person or a signal
"""

from __future__ import annotations

from typing import Any, Literal

from trainwright.estimator.errors import BadInput, BusyMachine, TrainwrightError


class DataRejected(TrainwrightError):
    """The data does not meet its expectations."""

    kind = "data_rejected"


class TrainingFailed(TrainwrightError):
    """Training ended without a model."""

    kind = "training_failed"


class CorruptArtefact(TrainwrightError):
    """A stored object is missing, cut short or changed."""

    kind = "corrupt_artefact"


class RunHeld(TrainwrightError):
    """Another process holds the run or its devices."""

    kind = "held"


class MustWait(TrainwrightError):
    """The run waits for devices; it is no failure, and the step is called again."""

    kind = "waiting"


class Infeasible(TrainwrightError):
    """No plan meets the limits."""

    kind = "infeasible"
    exit_code = 3


class ServiceUnreachable(TrainwrightError):
    """A needed service does not answer."""

    kind = "service_unreachable"
    exit_code = 4


class Unauthorized(TrainwrightError):
    """Who asks is not known."""

    kind = "unauthorized"


class Forbidden(TrainwrightError):
    """Who asks is known, but may not."""

    kind = "forbidden"


class Interrupted(TrainwrightError):
    """Stopped on request; what was saved can be resumed."""

    kind = "interrupted"
    exit_code = 130


_KINDS: dict[str, type[TrainwrightError]] = {
    error.kind: error
    for error in (
        TrainwrightError,
        BadInput,
        BusyMachine,
        DataRejected,
        TrainingFailed,
        CorruptArtefact,
        RunHeld,
        MustWait,
        Infeasible,
        ServiceUnreachable,
        Unauthorized,
        Forbidden,
        Interrupted,
    )
}


def from_document(document: dict[str, Any]) -> TrainwrightError:
    """The error that another process wrote down with `TrainwrightError.document`."""
    details = {key: value for key, value in document.items() if key not in ("kind", "message")}
    return _KINDS.get(str(document.get("kind")), TrainwrightError)(
        str(document.get("message", "")), **details
    )


__all__ = [
    "BadInput",
    "BusyMachine",
    "CorruptArtefact",
    "DataRejected",
    "Forbidden",
    "Infeasible",
    "Interrupted",
    "MustWait",
    "RunHeld",
    "ServiceUnreachable",
    "TrainingFailed",
    "TrainwrightError",
    "Unauthorized",
    "from_document",
]


def final_state(error: BaseException) -> Literal["failed", "infeasible", "interrupted"]:
    """The state of a run that ended with this error."""
    kind = getattr(error, "kind", "")
    return (
        "infeasible"
        if kind == "infeasible"
        else "interrupted"
        if kind == "interrupted"
        else "failed"
    )
