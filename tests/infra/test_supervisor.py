"""Parts of the embedded stack that end by themselves are started again; stopped ones stay so."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from trainwright.infra import supervisor as supervision
from trainwright.infra.background_process import BackgroundProcess, stop
from trainwright.infra.s3_server import s3_access, s3_answers, s3_service, start_s3, stop_s3
from trainwright.infra.supervisor import MOST_RESTARTS, WITHIN_S, Supervisor, supervised


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    stop([s3_service(tmp_path)], grace_s=0)


def killed(service: BackgroundProcess) -> None:
    pid = service.pid()
    assert pid is not None
    psutil.Process(pid).kill()
    while service.pid() is not None:
        time.sleep(0.05)


def test_a_killed_server_is_started_again_and_told_a_stopped_one_is_not(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "LOOK_EVERY_S", 0.1)
    access = start_s3(home)
    told: list[str] = []
    with supervised(Supervisor(home, told.append)):
        killed(s3_service(home))
        while not told:
            time.sleep(0.1)
        assert s3_answers(home)
        assert s3_access(home) == access
        assert "s3-server ended unexpectedly; started again" in told[0]
        stop_s3(home)
        time.sleep(0.5)
    assert s3_service(home).pid() is None
    assert len(told) == 1


def test_a_part_that_keeps_ending_is_left_after_some_restarts(home: Path) -> None:
    now = 0.0
    told: list[str] = []
    supervisor = Supervisor(home, told.append, now=lambda: now)
    (home / "s3").mkdir()
    s3_service(home).start([sys.executable, "-c", "print('no room')"], {})
    while s3_service(home).pid() is not None:
        time.sleep(0.05)
    (home / "s3" / "data").write_text("a file where its folder should be")
    for _ in range(MOST_RESTARTS + 3):
        supervisor.look()
    assert [line.partition(" ended")[2][:22] for line in told[:2]] == [", and can't be started"] * 2
    assert len(told) == MOST_RESTARTS + 1
    assert "6 times within 10 min, and is not started again: no room" in told[-1]
    now = WITHIN_S + 1
    supervisor.look()
    assert len(told) == MOST_RESTARTS + 2
