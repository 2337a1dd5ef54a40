"""Several hosts on one machine for tests, each with its own address, sshd, CPU quota and link.

A host is a network namespace on a bridge, with a mount and a host-name namespace in which its sshd
runs. Hosts share the machine's files, except for `private`, an empty folder that each host has for
itself. The test process is the driver, connected to the bridge. Needs root, iproute2 and
openssh-server. A guard process removes the lab if the test process is killed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainwright.infra.cpu_share import MOST_SHARES

PREFIX = "tw"  # names of links have at most 15 characters
_PERIOD_US, _LEAST_QUOTA_US = 10_000, 1000
_FOLDER = Path("/run/trainwright-lab")
_PROGRAMS = ("ip", "tc", "nsenter", "unshare", "sshd", "ssh", "ssh-keygen")
_SSHD = """
ListenAddress {address}:22
HostKey {folder}/{name}.key
AuthorizedKeysFile {folder}/user.key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PidFile none
MaxStartups 100
SetEnv CONTAINERS_CONF={folder}/containers.conf
"""
# For podman on hosts: Debian's crun refuses some layouts of cgroups, and limits above the caller's
# can't be set.
_CONTAINERS = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


@dataclass
class LabHost:
    """A host. `python` runs this Python there, with the host's own trainwright home."""

    name: str
    address: str
    namespace: str
    python: Path
    sshd: subprocess.Popen[bytes]
    group: Path | None = None
    """its cgroup, if it has a quota"""

    def hold(self, cores: float) -> None:
        """Set the CPU quota."""
        assert self.group is not None
        _set_quota(self.group, cores)

    def pids(self) -> list[int]:
        """The processes on the host."""
        return _pids(self.namespace)

    def words(self) -> list[str]:
        """The command lines of the processes on the host, without the sshd."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if line and "sshd" not in line.split()[0]:
                    found.append(line)
        return found

    def inside(self, *command: str) -> list[str]:
        """The command, wrapped to run on the host with its files."""
        return ["nsenter", f"--target={self.sshd.pid}", "--net", "--mount", "--uts", *command]


@dataclass
class Lab:
    """The hosts, with the ssh identity and host keys to connect to them."""

    tag: str
    folder: Path
    driver: str
    private: Path
    hosts: list[LabHost] = field(default_factory=list)

    @property
    def identity(self) -> Path:
        return self.folder / "user.key"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def pool(self, devices: Sequence[Sequence[dict[str, Any]]], **host: Any) -> dict[str, Any]:
        """A pool file of the hosts with these devices."""
        return {
            "name": "lab",
            "ssh": {"identity": str(self.identity), "known_hosts": str(self.known_hosts)},
            "hosts": [
                {
                    "name": one.name,
                    "address": one.address,
                    "python": str(one.python),
                    "devices": list(own),
                    **host,
                }
                for one, own in zip(self.hosts, devices, strict=True)
            ],
        }

    def cut(self, name: str) -> None:
        """Disconnect a host silently, like a failing switch."""
        _run("ip", "link", "set", self._link(name), "down")

    def join(self, name: str) -> None:
        """Connect a host again."""
        _run("ip", "link", "set", self._link(name), "up")

    def _link(self, name: str) -> str:
        return f"{self.tag}v{[host.name for host in self.hosts].index(name)}"


def why_not() -> str | None:
    """Why a lab is impossible here; None if it is possible."""
    if os.getuid() != 0:
        return "a lab of several hosts needs root"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    return (
        f"a lab of several hosts needs {', '.join(missing)}: make setup-system" if missing else None
    )


@pytest.fixture
def lab() -> Iterator[Callable[..., Lab]]:
    """`lab(cores=[0.5, 0.25, None], rate="200mbit")` makes a lab, which ends with the test."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda **wanted: stack.enter_context(running(**wanted))


@contextlib.contextmanager
def running(
    cores: Sequence[float | None] = (None, None, None),
    rate: str | None = None,
    private_size: str = "256m",
) -> Iterator[Lab]:
    """A lab with a host per quota of cores (None: no limit); `rate` limits links (tc syntax)."""
    _remove_stale()
    tag = _free_tag()
    guard = subprocess.Popen(
        [sys.executable, __file__, tag],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={"PATH": _path()},
    )
    made = Lab(tag, _FOLDER / tag, "", _FOLDER / tag / "private")
    try:
        _make(made, cores, rate, private_size)
        yield made
    finally:
        remove(tag)
        for host in made.hosts:
            host.sshd.wait()
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def _make(lab: Lab, cores: Sequence[float | None], rate: str | None, private_size: str) -> None:
    tag, folder, private, network = lab.tag, lab.folder, lab.private, _free_network()
    private.mkdir(parents=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    addresses = [str(address) for address in network.hosts()]
    bridge = f"{tag}b"
    _run("ip", "link", "add", bridge, "type", "bridge")
    _run("ip", "addr", "add", f"{addresses[0]}/24", "dev", bridge)
    _run("ip", "link", "set", bridge, "up")
    lab.driver = addresses[0]
    _keygen(lab.identity)
    known = []
    (folder / "containers.conf").write_text(_CONTAINERS)
    for number, quota in enumerate(cores):
        name, address, namespace = f"h{number + 1}", addresses[number + 1], f"{tag}n{number}"
        _wire(tag, number, namespace, address, rate)
        _keygen(folder / f"{name}.key")
        known.append(f"{address} {(folder / f'{name}.key.pub').read_text()}")
        (folder / f"{name}.conf").write_text(
            _SSHD.format(address=address, folder=folder, name=name)
        )
        setup = (
            f'hostname {name} && mount -t tmpfs -o size={private_size} tmpfs {private} && exec "$@"'
        )
        group = _cgroup(f"{tag}n{number}", quota) if quota is not None else None
        join = f"echo $$ > {group}/cgroup.procs && " if group is not None else ""
        command = [
            "nsenter",
            f"--net=/run/netns/{namespace}",
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
            join + setup,
            "sh",
            shutil.which("sshd", path=_path()) or "sshd",
            "-D",
            "-e",
            "-f",
            str(folder / f"{name}.conf"),
        ]
        with (folder / f"{name}.log").open("wb") as log:
            sshd = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": _path()},
            )
        lab.hosts.append(
            LabHost(name, address, namespace, _python(folder, name, private), sshd, group)
        )
    lab.known_hosts.write_text("".join(known))
    for host in lab.hosts:
        _wait_for_sshd(host, folder)


def _wire(tag: str, number: int, namespace: str, address: str, rate: str | None) -> None:
    """Create a namespace with `eth0` and this address; the other end is on the bridge."""
    link = f"{tag}v{number}"
    _run("ip", "netns", "add", namespace)
    _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _run("ip", "link", "set", link, "master", f"{tag}b", "up")
    _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    _run("ip", "-n", namespace, "link", "set", "eth0", "up")
    _run("ip", "-n", namespace, "link", "set", "lo", "up")
    if rate is not None:
        limit = ["root", "tbf", "rate", rate, "burst", f"{_burst_kb(rate)}kb", "latency", "50ms"]
        _run("tc", "qdisc", "add", "dev", link, *limit)
        _run("tc", "-n", namespace, "qdisc", "add", "dev", "eth0", *limit)


def _burst_kb(rate: str) -> int:
    """What a link may send at once after a pause: 1 ms of its rate, so that pauses gain nothing."""
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    number, unit = rate[:-4], rate[-4:]
    return min(64, max(8, round(float(number) * units[unit] * 1e-3 / 8 / 1024)))


def _python(folder: Path, name: str, private: Path) -> Path:
    """Write a script that runs this Python on a host."""
    path = folder / f"python-{name}"
    inherited = (
        f"export PYTHONPATH='{os.environ['PYTHONPATH']}'\n" if os.environ.get("PYTHONPATH") else ""
    )
    path.write_text(
        f"#!/bin/sh\n{inherited}export TRAINWRIGHT_HOME={private}/home\n"
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


def _cgroup(name: str, cores: float) -> Path:
    """Create a cgroup (version 1 or 2) with this quota."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    group = (first if (first / "cpu.cfs_quota_us").exists() else second) / name
    if group.parent == second:
        with contextlib.suppress(OSError):  # it may be enabled already
            (second / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir()
    # A host has its cores for itself, whatever else runs on this machine.
    if (group / "cpu.shares").exists():
        (group / "cpu.shares").write_text(str(MOST_SHARES))
    else:
        (group / "cpu.weight").write_text("10000")
    _set_quota(group, cores)
    return group


def _set_quota(group: Path, cores: float) -> None:
    period = max(_PERIOD_US, round(_LEAST_QUOTA_US / cores))
    quota = round(cores * period)
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} {period}")
        return
    (group / "cpu.cfs_quota_us").write_text("-1")  # at no time may the quota exceed the period
    (group / "cpu.cfs_period_us").write_text(str(period))
    (group / "cpu.cfs_quota_us").write_text(str(quota))


def _wait_for_sshd(host: LabHost, folder: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((host.address, 22), timeout=1):
            return
        if host.sshd.poll() is not None:
            break
        time.sleep(0.01)
    raise OSError(
        f"sshd of {host.name} does not answer: {(folder / f'{host.name}.log').read_text()}"
    )


def remove(tag: str) -> None:
    """End the hosts' processes, then remove the lab. Idempotent; any process may call it."""
    namespaces = [name for name in _namespaces() if name.startswith(f"{tag}n")]
    for _ in range(200):
        pids = [pid for name in namespaces for pid in _pids(name)]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for name in namespaces:
        _run("ip", "netns", "del", name, check=False)
    for link in Path("/sys/class/net").glob(
        f"{tag}[bv]*"
    ):  # removing the namespace later removes its links
        _run("ip", "link", "del", link.name, check=False)
    for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup"):
        for group in Path(root).glob(f"{tag}n*"):
            for folder in (*sorted(group.glob("*/"), reverse=True), group):
                with contextlib.suppress(OSError):
                    folder.rmdir()
    shutil.rmtree(_FOLDER / tag, ignore_errors=True)


def _remove_stale() -> None:
    """Remove the labs of processes that were killed together with their guard."""
    for tag in {name.rpartition("n")[0] for name in _namespaces() if name.startswith(PREFIX)}:
        pid = tag.removeprefix(PREFIX).partition("x")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove(tag)


def _free_tag() -> str:
    number = 0
    while (_FOLDER / f"{PREFIX}{os.getpid()}x{number}").exists():
        number += 1
    return f"{PREFIX}{os.getpid()}x{number}"


def _free_network() -> ipaddress.IPv4Network:
    """A network of 254 addresses that this machine has no route to."""
    taken = subprocess.run(
        ["ip", "-4", "route", "list", "table", "all"], capture_output=True, text=True, check=True
    )
    for number in range(os.getpid() % 40_000, 65_000):
        third = f"10.{100 + number // 256 % 150}.{number % 256}."
        if third not in taken.stdout:
            return ipaddress.IPv4Network(f"{third}0/24")
    raise OSError("no free network for the lab")


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _pids(namespace: str) -> list[int]:
    """The processes of a namespace, in any cgroup."""
    found = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]


def _keygen(path: Path) -> None:
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.stem, "-f", str(path))


def _path() -> str:
    return f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _path()}
    )
    if check and done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":  # the guard
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.read()
    remove(sys.argv[1])
