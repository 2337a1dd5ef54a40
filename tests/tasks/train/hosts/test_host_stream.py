"""The engine's process for a host, on this machine. The engine is a fake."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainwright.tasks.errors import ServiceUnreachable, TrainwrightError
from trainwright.tasks.spec.host_spec import Host
from trainwright.tasks.train.hosts.host_engine import HostRequest, HostStanding
from trainwright.tasks.train.hosts.host_stream import HostStream
from trainwright.tasks.train.hosts.hosts import Hosts


class FakeEngine:
    """Runs these words in place of the host's. It does not know where a request stands."""

    silence_s = 1.0

    def __init__(self, *words: str) -> None:
        self.words, self.variables, self.closed = words, dict[str, str](), False

    def command(self, asked: HostRequest, words: Sequence[str]) -> list[str]:
        return list(self.words)

    def standing(self, asked: HostRequest) -> HostStanding:
        raise ValueError("not a queue")

    def why_ended(self, stderr: str, code: int | None) -> str:
        return f"exit code {code}"

    def takes_back(self, stderr: str) -> bool:
        return False

    def out_of_memory(self, why: str) -> bool:
        return False

    def error(self, asked: HostRequest, why: str) -> TrainwrightError:
        return ServiceUnreachable(why, service="fake")

    def close(self) -> None:
        self.closed = True


def stream(folder: Path, *words: str) -> HostStream:
    host = Host.model_construct(name="h1", address="h1", memory=None)
    return HostStream(HostRequest(host, (), sys.executable), FakeEngine(*words), folder / "log")


def test_a_process_that_has_been_reaped_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stream(tmp_path, "false")
    assert made.why_ended() == "exit code 1"

    def killpg(number: int, signal: int) -> None:
        raise AssertionError(number)

    monkeypatch.setattr(os, "killpg", killpg)
    made.hang_up("the launch has ended")
    made.end(0.0)
    made.close()


def test_a_process_that_does_not_end_is_killed_after_the_grace(tmp_path: Path) -> None:
    made = stream(tmp_path, "sleep", "600")
    made.end(0.0)
    assert made.why_ended() == "exit code -9"
    made.close()


def test_an_engine_that_fails_ends_the_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = stream(tmp_path, "sleep", "600")
    with pytest.raises(ServiceUnreachable, match="in the queue is unknown: ValueError: not a que"):
        made.first_line()
    assert "not a queue" in caplog.text
    made.close()


def test_the_engine_is_closed_also_if_a_connection_can_not_be() -> None:
    class Broken:
        def close(self, grace_s: float) -> None:
            raise OSError(grace_s)

    engine, hosts = FakeEngine(), Hosts.__new__(Hosts)
    hosts.__dict__ |= {"_sessions": {"h1": Broken()}, "_reconnector": None, "_engine": engine}
    with pytest.raises(OSError, match="5"):
        hosts.close()
    assert engine.closed
