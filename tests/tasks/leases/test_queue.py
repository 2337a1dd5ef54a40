"""The queue on a real database: turns, expiry, fencing, revocation, competing processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainwright.tasks.leases.ledger import Heartbeat, Holder, Ledger
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.leases.waiting_place import waiting_place

FIGHT = Path(__file__).parents[2] / "benchmarks" / "leases.py"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")


def look(
    queue: Queue, run: str, wanted: list[str], needed: int = 1, **more: Any
) -> tuple[int, set[str]]:
    turn = queue.look(run, Holder(run), wanted, needed, **more)
    return turn.place, set(turn.available)


def test_a_run_takes_devices_in_its_turn_and_not_before(ledger: Ledger) -> None:
    queue = Queue(ledger)
    ledger.take(["a"], Holder("x"), "x")
    assert look(queue, "first", ["a", "b"], 2) == (1, {"b"})
    assert look(queue, "second", ["b", "c"]) == (2, {"c"})
    assert queue.take("second", Holder("second"), ["b"]) is None
    assert queue.take("stranger", Holder("stranger"), ["b"]) is None
    assert queue.take("second", Holder("second"), ["c"]) is not None
    ledger.release("x")
    assert look(queue, "first", ["a", "b"], 2) == (1, {"a", "b"})
    assert queue.take("first", Holder("first"), ["a", "b"]) is not None
    assert queue.waiting() == []


def test_a_waiting_run_has_a_place_and_knows_who_holds_its_devices(ledger: Ledger) -> None:
    queue = Queue(ledger)
    ledger.take(["device a"], Holder("x"), "x")
    look(queue, "first", ["device a", "device b"], 2)
    look(queue, "second", ["device c"])
    place = waiting_place("first", ledger)
    assert place is not None
    assert place.pop("waited_s") >= 0.0
    assert place == {
        "place": 1,
        "waiting": 2,
        "needed": 2,
        "of": 2,
        "free": 1,
        "held_by": [{"holder": "x", "run": "x"}],
    }
    assert waiting_place("x", ledger) is None


def test_a_run_keeps_its_devices_while_others_wait_for_them(ledger: Ledger) -> None:
    queue = Queue(ledger)
    first = queue.take("mine", Holder("mine"), ["a"])
    look(queue, "other", ["a"])
    again = queue.take("mine", Holder("mine"), ["a"])
    assert first is not None
    assert again is not None
    assert again > first


def test_a_waiting_run_that_died_or_slept_delays_no_other(ledger: Ledger) -> None:
    queue = Queue(ledger)
    with subprocess.Popen(["sleep", "60"]) as process:
        queue.look("killed", Holder("killed", process.pid), ["a"], 1)
        queue.look("asleep", Holder("asleep"), ["a"], 1, ttl_s=0.05)
        process.kill()
    time.sleep(0.06)
    assert look(queue, "me", ["a"]) == (1, {"a"})
    assert queue.keep("asleep") is None


def test_a_later_lease_of_the_same_run_and_holder_fences_the_earlier_one(ledger: Ledger) -> None:
    queue, me = Queue(ledger), Holder("Airflow retrain scheduled")
    zombie = queue.take("run", me, ["a"])
    retry = queue.take("run", me, ["a"])
    with Heartbeat(ledger, "run", ["a"], holder=me.name, token=zombie) as beat:
        assert not beat.mine()
    assert ledger.release("run", ["a"], holder=me.name, token=zombie) == 0
    assert ledger.renew("run", ["a"], holder=me.name, token=retry)


def test_a_run_of_a_strictly_higher_priority_requests_devices_and_the_holder_notices(
    ledger: Ledger,
) -> None:
    queue = Queue(ledger)
    token = queue.take("low", Holder("low"), ["a"], priority=1)
    look(queue, "equal", ["a"], priority=1)
    assert ledger.revoked_by("low") is None
    with Heartbeat(ledger, "low", ["a"], ttl_s=6, holder="low", token=token) as beat:
        look(queue, "high", ["a"], priority=2)
        assert ledger.revoked_by("low") == "high"
        assert beat.revoked.wait(timeout=60)
        assert beat.mine()
    assert queue.take("high", Holder("high"), ["a"], priority=2) is None
    ledger.release("low", token=token)
    assert look(queue, "low", ["a"], priority=1)[0] == 3
    assert queue.take("high", Holder("high"), ["a"], priority=2) is not None


SLEEPER = """
import sys, time
from trainwright.tasks.leases.ledger import Heartbeat, Holder, Ledger
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.leases.waiting_place import waiting_place
ledger = Ledger(sys.argv[1])
token = Queue(ledger).take("run", Holder("sleeper"), ["a"], ttl_s=1.0)
with Heartbeat(ledger, "run", ["a"], 1.0, holder="sleeper", token=token) as beat:
    print("taken", flush=True)
    sys.stdin.readline()
    print("writes" if beat.mine() else "refused", flush=True)
"""


def test_a_holder_stopped_past_its_expiry_does_not_write_after_it_continues(
    ledger: Ledger, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SLEEPER, f"sqlite:///{tmp_path / 'ledger.sqlite'}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        os.kill(process.pid, signal.SIGSTOP)
        try:
            token = None
            for _ in range(100):
                token = Queue(ledger).take("other", Holder("other"), ["a"])
                if token is not None:
                    break
                time.sleep(0.1)
            assert token is not None
        finally:
            os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "refused\n"


def fight(*options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(FIGHT), "--json", *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def safe(found: dict[str, Any]) -> None:
    assert found["turns"] > 0
    assert found["killed"] > 0
    assert found["stopped"] > 0
    # The benchmark measures waits; test_queue_order proves that no run starves.
    never = ("unsafe", "harmful", "mixed", "lost")
    assert {name: found[name] for name in never} == dict.fromkeys(never, 0), found


def test_competing_processes_never_share_a_device_while_some_are_killed_and_stopped() -> None:
    safe(fight("--processes", "12", "--seconds", "10"))


@pytest.mark.slow
@pytest.mark.parametrize("url", ["sqlite", "postgresql"])
def test_fifty_processes_compete_for_devices(url: str) -> None:
    safe(fight("--url", url, "--seconds", "10"))
