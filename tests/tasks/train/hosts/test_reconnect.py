"""Reconnection of lost hosts: an error with one host does not affect the others."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from trainwright.tasks.train.hosts import reconnect
from trainwright.tasks.train.hosts.reconnect import Reconnector, Shares
from trainwright.tasks.train.hosts.session import Session


def test_an_unexpected_error_with_one_host_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconnect, "TRY_EVERY_S", 0.001)
    tried, enough = Counter[str](), threading.Event()

    def connect(address: str) -> Session:
        tried[address] += 1
        if min(tried["a"], tried["b"]) > 2:
            enough.set()
        raise KeyError("python")

    def admit(session: Session) -> Shares:
        raise AssertionError(session)

    hosts = Reconnector(lambda: ["a", "b"], connect, admit)
    try:
        assert enough.wait(60)
    finally:
        hosts.close()
    assert "host a can't rejoin" in caplog.text
    assert "KeyError: 'python'" in caplog.text
