"""Background processes: they outlive their starter, are recognised, and end with descendants."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from trainwright.infra.background_process import BackgroundProcess, stop, wait_until
from trainwright.infra.private_files import write_private

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)",
]
# One child in the same session, one in another session, one without its parent.
FAMILY = """
import subprocess, sys, time
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleeps)
subprocess.Popen(sleeps, start_new_session=True)
orphan = f"import subprocess; subprocess.Popen({sleeps!r}, start_new_session=True)"
subprocess.run([sys.executable, "-c", orphan])
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[BackgroundProcess]:
    one = BackgroundProcess("sleeper", tmp_path)
    yield one
    stop([one], grace_s=0)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def says_up(sleeper: BackgroundProcess) -> bool:
    return sleeper.last_line() == "up"


def test_a_process_outlives_its_starter_and_is_recognised(sleeper: BackgroundProcess) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from trainwright.infra.background_process import BackgroundProcess\n"
        f"BackgroundProcess('sleeper', Path(sys.argv[1])).start({SLEEPS!r}, {{}})"
    )
    subprocess.run([sys.executable, "-c", code, str(sleeper.folder)], check=True)
    pid = sleeper.pid()
    assert pid is not None
    assert psutil.Process(pid).is_running()


def test_stop_ends_a_process_and_its_descendants(sleeper: BackgroundProcess) -> None:
    sleeper.start([sys.executable, "-c", FAMILY], {})
    wait_until(lambda: says_up(sleeper), [sleeper], timeout_s=30)
    family = sleeper.processes()
    assert len(family) == 4
    stop([sleeper], grace_s=10)
    assert alive(family) == []
    assert sleeper.pid() is None


def test_processes_left_by_a_killed_service_are_found_and_ended(sleeper: BackgroundProcess) -> None:
    sleeper.start([sys.executable, "-c", FAMILY], {})
    wait_until(lambda: says_up(sleeper), [sleeper], timeout_s=30)
    family = sleeper.processes()
    pid = sleeper.pid()
    assert pid is not None
    psutil.Process(pid).kill()
    while sleeper.pid() is not None:
        time.sleep(0.01)
    assert len(sleeper.processes()) == 3
    stop([sleeper], grace_s=10)
    assert alive(family) == []


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_period(
    sleeper: BackgroundProcess,
) -> None:
    sleeper.start(["env", "PYTHONUNBUFFERED=1", *DEAF], {})
    wait_until(lambda: says_up(sleeper), [sleeper], timeout_s=30)
    stop([sleeper], grace_s=0.5)
    assert sleeper.pid() is None


def test_a_recycled_process_id_is_not_taken_for_the_process(sleeper: BackgroundProcess) -> None:
    with subprocess.Popen(SLEEPS, start_new_session=True) as other:
        write_private(sleeper.folder / "sleeper.json", json.dumps({"pid": other.pid, "started": 1}))
        assert sleeper.pid() is None
        stop([sleeper], grace_s=0)
        assert other.poll() is None
        other.kill()


def test_a_process_that_ends_during_its_start_is_an_error_with_its_last_line(
    sleeper: BackgroundProcess,
) -> None:
    sleeper.start([sys.executable, "-c", "raise SystemExit('no such option: -x')"], {})
    with pytest.raises(OSError, match="sleeper ended during its start: no such option: -x"):
        wait_until(lambda: False, [sleeper], timeout_s=30)


def test_a_process_that_is_never_ready_is_a_timeout_that_names_its_logs(
    sleeper: BackgroundProcess,
) -> None:
    sleeper.start(SLEEPS, {})
    with pytest.raises(TimeoutError, match=str(sleeper.folder)):
        wait_until(lambda: False, [sleeper], timeout_s=0.1)
