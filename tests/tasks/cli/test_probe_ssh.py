"""Finding another host's devices by ssh: a real sshd with a known, unknown or changed key."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import doors
import pytest

from trainwright.tasks.cli.pool_probe import probe
from trainwright.tasks.errors import ServiceUnreachable

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = pytest.mark.skipif(
    SSHD is None, reason="openssh-server is not installed (make setup-system installs it)"
)


def key(path: Path) -> str:
    """A new key pair; the public key."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], str]]:
    """Starts sshd and returns its address, for a key in known_hosts ("its": the right one)."""
    assert SSHD is not None
    tmp_path.chmod(0o700)
    host_key = key(tmp_path / "host")
    (tmp_path / "authorized").write_text(key(tmp_path / "user") + "\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "sshd_config").write_text(
        f"HostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/authorized\n"
        f"ListenAddress 127.0.0.1:{port}\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nStrictModes no\nUsePAM no\nPidFile none\n"
        "PermitRootLogin prohibit-password\n"
    )
    (tmp_path / "ssh_config").write_text(
        f"Host lab\n HostName 127.0.0.1\n Port {port}\n User {getpass.getuser()}\n"
        f" IdentityFile {tmp_path}/user\n"
        f" IdentitiesOnly yes\n UserKnownHostsFile {tmp_path}/known\n GlobalKnownHostsFile none\n"
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    # ssh looks for its configuration in the home of the password file, whatever HOME says.
    (programs / "ssh").write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/ssh_config "$@"\n'
    )
    (programs / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # as Debian's service does before it starts
    server = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(tmp_path / "sshd_config")], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if "listening" in line:
                break
        else:
            raise AssertionError(f"sshd ended with {server.wait()}")

        def known(known_key: str | None) -> str:
            line = (
                ""
                if known_key is None
                else f"[127.0.0.1]:{port} {host_key if known_key == 'its' else known_key}\n"
            )
            (tmp_path / "known").write_text(line)
            return "lab"

        yield known
    finally:
        server.terminate()
        server.wait()


def test_a_host_with_a_known_key_reports_its_devices(
    host: Callable[[str | None], str], home: Path
) -> None:
    pool = probe([host("its")], doors.settings())
    assert pool.hosts[0].address == "lab"
    here = probe([], doors.settings()).hosts[0].devices
    found = pool.hosts[0].devices
    assert [device.type for device in found] == [device.type for device in here]
    assert (pool.hosts[0].memory or 0) > 2**30


def test_the_command_writes_a_pool_file_that_the_next_command_reads(
    host: Callable[[str | None], str], home: Path, tmp_path: Path
) -> None:
    def trainwright(*words: str) -> str:
        command = [sys.executable, "-m", "trainwright.tasks.cli.main", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    found = json.loads(
        trainwright(
            "pool", "probe", "--host", host("its"), "--out", f"{tmp_path}/pool.yaml", "--json"
        )
    )
    state = json.loads(trainwright("pool", f"{tmp_path}/pool.yaml", "--json"))
    (device, *_) = state["devices"]
    assert (device["type"], device["address"], device["holder"]) == ("cpu", "lab", None)
    assert device["id"].startswith(found["hosts"][0]["name"] + "/cpu")
    assert device["cores"] == len(os.sched_getaffinity(0))


def test_an_unknown_key_gives_one_clear_line(host: Callable[[str | None], str], home: Path) -> None:
    address = host(None)
    with pytest.raises(
        ServiceUnreachable,
        match=r"^host lab: its host key is not in known_hosts: .*; "
        r"`ssh -o .* lab python3 -V` must work$",
    ) as caught:
        probe([address], doors.settings())
    assert "\n" not in str(caught.value)
    command = [
        sys.executable,
        "-m",
        "trainwright.tasks.cli.main",
        "pool",
        "probe",
        "--host",
        address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr


def test_a_key_that_differs_from_the_known_one_gives_one_clear_line(
    host: Callable[[str | None], str], home: Path, tmp_path: Path
) -> None:
    address = host(key(tmp_path / "other"))
    with pytest.raises(
        ServiceUnreachable, match=r"is not the one in known_hosts \(it shows SHA256:\S+\)"
    ) as caught:
        probe([address], doors.settings())
    assert "\n" not in str(caught.value)


def test_a_host_that_refuses_the_user_is_reported(
    host: Callable[[str | None], str], home: Path, tmp_path: Path
) -> None:
    address = host("its")
    (tmp_path / "authorized").write_text("")
    with pytest.raises(ServiceUnreachable, match=r"host lab: .*Permission denied \(publickey\)"):
        probe([address], doors.settings())
