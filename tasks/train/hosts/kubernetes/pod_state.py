"""What the state of a host's pods means: waiting, or no pod will come. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainwright.tasks.errors import BadInput, ServiceUnreachable

_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_WRONG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
OUT_OF_MEMORY = "was killed for lack of memory (OOMKilled)"
Pod = dict[str, Any]


def why_refused(pods: Sequence[Pod]) -> BadInput | ServiceUnreachable | None:
    """The error for a pod that will not connect (any more); None while it may."""
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for reason, message in _waiting(status):
            if reason in _NO_IMAGE:
                return BadInput(f"kubernetes.image: can't be pulled: {message or reason}")
            if reason in _WRONG:
                return BadInput(f"kubernetes: the pod {name} can't start: {message or reason}")
        if status.get("phase") == "Failed":
            said = _ended(status) or status.get("message") or "its process failed"
            reason = f"{status['reason']}: " if status.get("reason") else ""
            return ServiceUnreachable(
                f"the pod {name} ended: {reason}{_one_line(said)}", service="kubernetes"
            )
    return None


def why_waiting(pods: Sequence[Pod]) -> str:
    """What a host waits for, for people."""
    if not pods:
        return "for its pod, which the cluster has not made yet"
    status = pods[-1].get("status", {})
    for one in status.get("conditions", ()):
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            why = one.get("message") or one.get("reason") or "not scheduled yet"
            return f"for its pod: {_one_line(str(why))}"
    for reason, message in _waiting(status):
        return f"for its pod: {_one_line(f'{reason}: {message}' if message else reason)}"
    running = status.get("phase") == "Running"
    return f"for its pod, which {'has not connected' if running else 'is not scheduled'} yet"


def _waiting(status: Pod) -> Iterator[tuple[str, str]]:
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting")
        if waiting:
            yield str(waiting.get("reason", "")), _one_line(str(waiting.get("message", "")))


def _ended(status: Pod) -> str:
    for container in status.get("containerStatuses", ()):
        ended = container.get("state", {}).get("terminated")
        if ended and ended.get("reason") == "OOMKilled":
            return OUT_OF_MEMORY
        if ended:
            return str(ended.get("message") or f"exit code {ended.get('exitCode')}")
    return ""


def _one_line(text: str) -> str:
    """The last line that says something, as a pod's log ends with it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else ""
