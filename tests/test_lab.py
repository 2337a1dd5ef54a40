"""The lab itself: hosts have their own address and quota, and a killed test leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import Lab, LabHost, why_not


def _on(host: LabHost, *command: str) -> str:
    return subprocess.run(host.inside(*command), capture_output=True, text=True, check=True).stdout


def _left_of(tag: str) -> list[str]:
    """The remains of a lab on this machine."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    folders = ("/run/netns", "/run/trainwright-lab", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup")
    found = [str(path) for folder in folders for path in Path(folder).glob(f"{tag}*")]
    return found + [line for line in links.splitlines() if tag in line]


def test_hosts_have_their_own_addresses_files_and_quotas(lab: Callable[..., Lab]) -> None:
    made = lab(cores=[0.5, None], rate="100mbit")
    first, second = made.hosts
    assert first.address != second.address
    assert [_on(host, "hostname").strip() for host in made.hosts] == ["h1", "h2"]
    _on(first, "touch", str(made.private / "mine"))
    assert _on(second, "ls", str(made.private)) == ""
    groups = [Path(f"/proc/{host.sshd.pid}/cgroup").read_text() for host in made.hosts]
    assert first.namespace in groups[0]
    assert second.namespace not in groups[1]
    assert "rate 100Mbit" in _on(first, "tc", "qdisc", "show", "dev", "eth0")


def test_a_lab_whose_process_is_killed_leaves_nothing() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    code = """if True:
        import lab, time
        with lab.running(cores=[0.5]) as made:
            print(made.tag, flush=True)
            time.sleep(60)"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        env=os.environ,
    )
    assert process.stdout is not None
    tag = process.stdout.readline().strip()
    assert _left_of(tag)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    for _ in range(1200):
        if not _left_of(tag):
            return
        time.sleep(0.05)
    assert _left_of(tag) == []
