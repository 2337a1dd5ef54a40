"""The ledger's database with a client stopped in a transaction, on SQLite and PostgreSQL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lease_fight.temporary_postgresql import postgresql

from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.leases import database
from trainwright.tasks.leases.ledger import Holder, Ledger

STOPPED = """
import os, signal, sys
from trainwright.tasks.leases.ledger import Holder, Ledger
times = []
def statements(connection):
    times.append(0)
    if len(times) == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return len(times)
print(Ledger(sys.argv[1]).database.serialised(statements))
"""

BEGIN = """
import sys, time
from trainwright.tasks.leases.ledger import Ledger
print("loaded", flush=True)
start = float(sys.stdin.readline())
for n in range(60):
    time.sleep(max(0, start + 0.05 * n - time.time()))
    assert Ledger(f"sqlite:///{sys.argv[1]}/{n}.sqlite").held() == []
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.sqlite'}"
        return
    try:
        with postgresql() as address:
            yield address
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_a_client_stopped_in_a_transaction_delays_the_others_only_briefly(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LOCK_TIMEOUT_S", 3.0)
    Ledger(url).take(["other"], Holder("me"), "run")
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, url], stdout=subprocess.PIPE, text=True
    )
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        if url.startswith("sqlite"):
            with pytest.raises(
                ServiceUnreachable, match=rf"locked by process {process.pid}, which is stopped"
            ):
                Ledger(url).take(["device a"], Holder("me"), "run")
        else:
            Ledger(url).take(["device a"], Holder("me"), "run")
        # A client that only reads is not delayed.
        assert "other" in {lease.resource for lease in Ledger(url).held()}
    finally:
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate(timeout=60)
    # PostgreSQL rolled the transaction back, so its statements ran twice.
    assert said.strip() == ("1" if url.startswith("sqlite") else "2")
    Ledger(url).take(["device a"], Holder("me"), "run")


def test_several_processes_can_create_a_ledgers_tables_at_once(tmp_path: Path) -> None:
    command, pipe = [sys.executable, "-c", BEGIN, str(tmp_path)], subprocess.PIPE
    processes = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(6)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
    start = f"{time.time() + 0.5}\n"
    assert [process.communicate(start, timeout=300)[1][-300:] for process in processes] == [""] * 6


def test_a_recreated_ledger_issues_larger_tokens_than_the_lost_one(
    tmp_path: Path,
) -> None:
    lost = Ledger(f"sqlite:///{tmp_path / 'lost.sqlite'}")
    given = [lost.take(["a"], Holder("me"), "run") for _ in range(2)]
    assert given[1] > given[0]
    time.sleep(2.1)  # tokens grow with the clock, in seconds
    assert (
        Ledger(f"sqlite:///{tmp_path / 'again.sqlite'}").take(["a"], Holder("me"), "run") > given[1]
    )
