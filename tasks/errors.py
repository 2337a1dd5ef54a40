"""The errors of the steps. There is one class for each case that callers handle differently.

TrainwrightError              exit code
├── BadInput              2   a job, pool, model or option is wrong
├── DataRejected          1   validation failed: names the expectations
├── TrainingFailed        1   a rank failed, or the loss is not a number
├── CorruptArtefact       1   a stored object differs from what was written
├── RunHeld               1   another process holds the run, its devices or a file
├── BusyMachine           1   the machine was too busy during a measurement
├── MustWait              1   the run waits in the queue for devices (operators defer on it)
├── Infeasible            3   no plan meets the limits: names them, and the nearest that can be met
├── ServiceUnreachable    4   a service does not answer or refuses: names it and the way out
│   └── NotInstalled      4   a package or program is missing: names it, and how to install it
├── Unauthorized          1   the request has no valid token
├── Forbidden             1   the token is valid, but does not allow the request
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
    """The run waits for devices. Not a failure: call the step again.

    Its details are the fields of the `queue` event: run, holder and place in the queue.
    """

    kind = "waiting"


class Infeasible(TrainwrightError):
    """No plan meets the limits."""

    kind = "infeasible"
    exit_code = 3


class ServiceUnreachable(TrainwrightError):
    """A required service does not answer, refuses the login, or can't be written to."""

    kind = "service_unreachable"
    exit_code = 4


class NotInstalled(ServiceUnreachable):
    """A required package or program is not installed on this machine. A retry can't help."""

    kind = "not_installed"


class Unauthorized(TrainwrightError):
    """The request has no valid token."""

    kind = "unauthorized"


class Forbidden(TrainwrightError):
    """The token is valid, but does not allow the request."""

    kind = "forbidden"


class Interrupted(TrainwrightError):
    """Stopped on request; a retry resumes from what was saved."""

    kind = "interrupted"
    exit_code = 130


class Preempted(Interrupted):
    """A cluster took hosts back without which the training can't go on; it waits for others."""

    kind = "preempted"


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
        NotInstalled,
        Unauthorized,
        Forbidden,
        Interrupted,
        Preempted,
    )
}


def from_document(document: dict[str, Any]) -> TrainwrightError:
    """The error that another process serialised with `TrainwrightError.document`."""
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
    "NotInstalled",
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
