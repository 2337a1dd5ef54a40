"""Background processes outlive their starter, are found again, and end with all their children."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from trainwright.infra.background import Service, free_ports, stop, wait_until, write_private

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)",
]
# One child in the same session, one in a session of its own, one whose parent is gone.
FAMILY = """
import subprocess, sys, time
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleeps)
subprocess.Popen(sleeps, start_new_session=True)
code = f"import subprocess; subprocess.Popen({sleeps!r}, start_new_session=True)"
subprocess.run([sys.executable, "-c", code])
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    one = Service("sleeper", tmp_path)
    yield one
    stop([one], grace_s=0)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def says_up(service: Service) -> bool:
    return service.last_words() == "up"


def test_a_service_outlives_its_starter_and_is_known_again(service: Service) -> None:
    code = (
        "import sys; from pathlib import Path; from trainwright.infra.background import Service\n"
        f"Service('sleeper', Path(sys.argv[1])).start({SLEEPS!r}, {{}})"
    )
    subprocess.run([sys.executable, "-c", code, str(service.folder)], check=True)
    pid = service.pid()
    assert pid is not None
    assert psutil.Process(pid).is_running()


def test_stop_ends_all_that_a_service_started(service: Service) -> None:
    service.start([sys.executable, "-c", FAMILY], {})
    wait_until(lambda: says_up(service), [service], timeout_s=30)
    family = service.processes()
    assert len(family) == 4
    stop([service], grace_s=10)
    assert alive(family) == []
    assert service.pid() is None


def test_what_a_killed_service_left_behind_is_found_and_ended(service: Service) -> None:
    service.start([sys.executable, "-c", FAMILY], {})
    wait_until(lambda: says_up(service), [service], timeout_s=30)
    family = service.processes()
    pid = service.pid()
    assert pid is not None
    psutil.Process(pid).kill()
    while service.pid() is not None:
        time.sleep(0.01)
    assert len(service.processes()) == 3
    stop([service], grace_s=10)
    assert alive(family) == []


def test_a_service_deaf_to_sigterm_is_killed_after_the_grace(service: Service) -> None:
    service.start(["env", "PYTHONUNBUFFERED=1", *DEAF], {})
    wait_until(lambda: says_up(service), [service], timeout_s=30)
    stop([service], grace_s=0.5)
    assert service.pid() is None


def test_a_recycled_process_id_is_not_taken_for_the_service(service: Service) -> None:
    with subprocess.Popen(SLEEPS, start_new_session=True) as other:
        write_private(service.folder / "sleeper.json", json.dumps({"pid": other.pid, "started": 1}))
        assert service.pid() is None
        stop([service], grace_s=0)
        assert other.poll() is None
        other.kill()


def test_a_service_that_ends_while_it_starts_is_an_error_with_its_last_words(
    service: Service,
) -> None:
    service.start([sys.executable, "-c", "raise SystemExit('no such option: -x')"], {})
    with pytest.raises(OSError, match="sleeper ended while it started: no such option: -x"):
        wait_until(lambda: False, [service], timeout_s=30)


def test_a_service_that_never_is_ready_is_a_timeout_that_names_its_logs(service: Service) -> None:
    service.start(SLEEPS, {})
    with pytest.raises(TimeoutError, match=str(service.folder)):
        wait_until(lambda: False, [service], timeout_s=0.1)


def test_free_ports_keep_the_preferred_ones_only_while_all_are_free() -> None:
    with free_ports(4, 20_000) as first:
        pass
    with free_ports(4, first) as again:
        assert again == first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 3))
        taken.listen()
        with free_ports(4, first) as other:
            assert first + 3 not in range(other, other + 4)


def test_who_asks_for_ports_at_once_gets_others_and_those_of_a_killed_process_are_free() -> None:
    ask = (
        "with free_ports(4, int(sys.argv[1])) as first:\n"
        "    print(first, flush=True); time.sleep(600)"
    )
    code = f"import sys, time\nfrom trainwright.infra.background import free_ports\n{ask}"
    with free_ports(4, 20_000) as first:
        pass
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(first)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    try:
        given = [int(one.stdout.readline()) for one in asking if one.stdout is not None]
        assert len({port for found in given for port in range(found, found + 4)}) == 12
        with free_ports(4, first) as mine:
            assert mine not in given
    finally:
        for one in asking:
            one.kill()
            one.communicate()
    with free_ports(4, first) as mine:
        assert mine == first


def test_a_private_file_is_its_owners_only_and_replaced_whole(tmp_path: Path) -> None:
    os.umask(0o022)
    write_private(tmp_path / "keys", "one")
    write_private(tmp_path / "keys", "two")
    assert (tmp_path / "keys").read_text() == "two"
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
