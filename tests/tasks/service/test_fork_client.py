"""How the end of a process that works for the service is told."""

from __future__ import annotations

import json

import pytest

from trainwright.tasks.errors import BadInput
from trainwright.tasks.service.compute.fork_client import ForkClient
from trainwright.tasks.settings import Settings


@pytest.mark.parametrize(
    ("ended", "code", "last", "says"),
    [
        ("late", 0, "", "tracing it did not end within 5 s"),
        ("done", -24, "", "tracing it did not end within 5 s"),
        ("done", 1, "MemoryError", "took more than the 2 GiB allowed: MemoryError"),
        (
            "late",
            0,
            "MemoryError",
            "took more than the 2 GiB allowed and did not end within 5 s: MemoryError",
        ),
        ("late", 0, "allocating buffers", "tracing it did not end within 5 s"),
        (
            "late",
            0,
            "BlockingIOError: [Errno 11] Resource temporarily unavailable",
            "started more processes than are allowed",
        ),
        ("done", 7, "", "ended its process (7) without an answer"),
    ],
)
def test_memory_and_processes_are_told_before_the_time(
    ended: str, code: int, last: str, says: str
) -> None:
    client = ForkClient("trace", Settings(), timeout_s=5, memory_limit_bytes=2 * 2**30)
    how = {"ended": ended, "code": code, "limit_s": 5, "last": last}
    with pytest.raises(BadInput) as raised:
        client._checked(b"-" + json.dumps(how).encode())
    assert says in str(raised.value)
