"""Leases: all or none, one holder, ended by release, expiry or the end of the holder's process.

Real processes, real SQLite.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainwright.tasks.errors import RunHeld, ServiceUnreachable
from trainwright.tasks.leases.ledger import Heartbeat, Holder, Ledger

RACE = """
import sys, time
from trainwright.tasks.leases.ledger import Holder, Ledger
from trainwright.tasks.errors import RunHeld
ledger, me, until = Ledger(sys.argv[1]), sys.argv[2], float(sys.argv[3])
time.sleep(max(0, until - time.time()))
won = 0
for _ in range(40):
    try:
        ledger.take(["device a", "device b"], Holder(me), me)
    except RunHeld:
        continue
    held = {lease.resource: lease.run for lease in ledger.held()}
    assert held == {"device a": me, "device b": me}, held
    won += 1
    assert ledger.release(me) == 2
print(won)
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.sqlite'}"


def test_a_lease_takes_all_resources_or_none_and_names_the_holder(url: str) -> None:
    ledger = Ledger(url)
    ledger.take(["device a"], Holder("alice"), "run-1")
    with pytest.raises(RunHeld, match="device a is held by alice for run-1") as caught:
        ledger.take(["device a", "device b"], Holder("bob"), "run-2")
    assert caught.value.details["holder"] == "alice"
    assert [lease.resource for lease in ledger.held()] == ["device a"]


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_setting_the_machines_clock_ends_no_lease_and_prolongs_none(
    url: str, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    ledger, ours, wall_s = Ledger(url), Holder("alice", os.getpid()), time.time
    ledger.take(["device a"], ours, "run-1")
    ledger.take(["device b"], Holder("carol"), "run-3", ttl_s=0.2)
    monkeypatch.setattr(time, "time", lambda: wall_s() + jump_s)
    with pytest.raises(RunHeld, match="device a is held by alice"):
        ledger.take(["device a"], Holder("bob"), "run-2")
    while ledger.holds("run-3", "device b"):
        time.sleep(0.05)
    assert ledger.renew("run-1", ["device a"])


def test_a_run_that_leases_its_resources_again_gets_a_larger_token(url: str) -> None:
    ledger = Ledger(url)
    first = ledger.take(["device a"], Holder("alice"), "run-1")
    assert ledger.take(["device a", "device b"], Holder("alice"), "run-1") > first
    assert ledger.release("run-1") == 2
    assert ledger.release("run-1") == 0


def test_an_expired_lease_can_not_be_renewed(url: str) -> None:
    ledger = Ledger(url)
    ledger.take(["device a"], Holder("alice"), "run-1", ttl_s=0.05)
    time.sleep(0.1)
    assert ledger.held() == []
    ledger.take(["device a"], Holder("bob"), "run-2")
    assert not ledger.renew("run-1", ["device a"])
    assert ledger.renew("run-2", ["device a"])


def test_a_lease_ends_with_its_holders_process(url: str) -> None:
    ledger = Ledger(url)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        ledger.take(["device a"], Holder("child", process.pid), "run-1")
        assert [lease.holder for lease in ledger.held()] == ["child"]
    finally:
        process.kill()
        process.communicate()
    assert ledger.held() == []
    ledger.take(["device a"], Holder("me", os.getpid()), "run-2")


def test_a_heartbeat_renews_a_lease_and_notices_its_loss(url: str) -> None:
    ledger = Ledger(url)
    ledger.take(["device a"], Holder("alice"), "run-1", ttl_s=6)
    with Heartbeat(ledger, "run-1", ["device a"], ttl_s=6) as beat:
        first = ledger.held()[0].expires_at
        while ledger.held()[0].expires_at == first:
            time.sleep(0.05)
        ledger.release("run-1")
        ledger.take(["device a"], Holder("bob"), "run-2")
        assert beat.lost.wait(timeout=60)


def test_a_heartbeat_logs_an_error_of_its_own_and_goes_on(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(url)
    ledger.take(["device a"], Holder("alice"), "run-1", ttl_s=3)
    answers = iter([ValueError("a row that can't be read")])

    def revoked_by(run: str) -> str | None:
        for error in answers:
            raise error
        return "run-2"

    monkeypatch.setattr(ledger, "revoked_by", revoked_by)
    with Heartbeat(ledger, "run-1", ["device a"], ttl_s=3) as beat:
        assert beat.revoked.wait(timeout=60)
        assert not beat.lost.is_set()
    (record,) = (one for one in caplog.records if one.levelname == "ERROR")
    assert record.getMessage() == "heartbeat of run-1 failed; it is tried again"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


def test_a_heartbeat_renews_before_its_block_begins(url: str) -> None:
    ledger = Ledger(url)
    ledger.take(["device a"], Holder("alice"), "run-1", ttl_s=30)
    before = ledger.held()[0].expires_at
    with Heartbeat(ledger, "run-1", ["device a"], ttl_s=600) as beat:
        assert ledger.held()[0].expires_at > before + 300
        assert not beat.lost.is_set()
    ledger.release("run-1")
    with Heartbeat(ledger, "run-1", ["device a"], ttl_s=600) as beat:
        assert beat.lost.is_set()


def test_a_heartbeat_that_never_reached_the_ledger_does_not_confirm_the_lease(
    url: str, tmp_path: Path
) -> None:
    ledger = Ledger(url)
    ledger.take(["device a"], Holder("alice"), "run-1")
    beat = Heartbeat(ledger, "run-1", ["device a"])
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other:
        other.execute("DROP TABLE leases")
    assert not beat.mine()
    with pytest.raises(ServiceUnreachable), beat:
        pass


def test_concurrent_processes_never_share_a_device(url: str) -> None:
    start = str(time.time() + 1.5)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, url, f"run-{n}", start], stdout=subprocess.PIPE, text=True
        )
        for n in range(4)
    ]
    won = [int(racer.communicate(timeout=300)[0]) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    assert sum(won) > 0
    assert Ledger(url).held() == []


def test_an_unreachable_ledger_is_named_without_its_password(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceUnreachable, match="TRAINWRIGHT_LEDGER"):
        Ledger(f"sqlite:///{tmp_path}/file/ledger.sqlite").held()


def test_a_holder_that_lost_its_lease_can_not_change_its_successors_even_for_the_same_run(
    url: str,
) -> None:
    ledger = Ledger(url)
    ledger.take(["device a"], Holder("asleep"), "run-1", ttl_s=0.05)
    time.sleep(0.1)
    ledger.take(["device a"], Holder("awake"), "run-1")
    assert not ledger.renew("run-1", ["device a"], holder="asleep")
    assert ledger.release("run-1", holder="asleep") == 0
    with pytest.raises(RunHeld, match="held by awake"):
        ledger.take(["device a"], Holder("asleep"), "run-1")
    assert [lease.holder for lease in ledger.held()] == ["awake"]


def test_a_holder_whose_ledger_fails_notices_it_when_its_lease_expires(
    url: str, tmp_path: Path
) -> None:
    ledger = Ledger(url)
    ledger.take(["device a"], Holder("alice"), "run-1", ttl_s=0.6)
    with Heartbeat(ledger, "run-1", ["device a"], ttl_s=0.6, holder="alice") as beat:
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other:
            other.execute("DROP TABLE leases")
        assert beat.lost.wait(timeout=60)
        assert not beat.mine()
