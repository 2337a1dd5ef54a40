"""A Slurm cluster on the hosts of a lab (`lab`), for tests: munge, a controller, a slurmd per host.

The controller runs beside the test process; the nodes h1, h2, … are the lab's hosts. All of it ends
with the test process, however that ends. Needs Debian's slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lab
import pytest

from trainwright.infra.process import dying_with_parent

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "squeue", "scancel", "scontrol", "sinfo")
_PREEMPTION_GRACE_S = 20
_SILENCE_S = 10
_UNUSED_MAJOR = 240
_CONFIG = """
ClusterName=lab
SlurmctldHost={here}({driver})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/task_prolog
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={silence}
KillWait=2
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PriorityType=priority/basic
GresTypes=gpu
{nodes}
PartitionName=work Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace} DefMemPerCPU=100
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF DefMemPerCPU=100
PartitionName=closed Nodes=ALL DisableRootJobs=YES
PartitionName=theirs Nodes=ALL AllowAccounts=physics DefMemPerCPU=100
"""


class SlurmLab:
    """The cluster. Its nodes have one CPU and 3 GiB each; h1 also `fast`, a feature, and a GPU.

    The GPU is a fake, the fourth device node of its kind. Nobody may open it.
    """

    def __init__(self, made: lab.Lab) -> None:
        self.lab = made
        self.folder = made.folder / "slurm"
        self.folder.mkdir()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.config = self.folder / "slurm.conf"

    def start(self) -> None:
        """Start everything, and wait until all nodes are idle."""
        (self.folder / "state").mkdir()
        nodes = "\n".join(
            f"NodeName={one.name} NodeAddr={one.address} CPUs=1 RealMemory=3072"
            f"{' Feature=fast Gres=gpu:a100:1' if one.name == 'h1' else ''}"
            for one in self.lab.hosts
        )
        config = _CONFIG.format(
            here=socket.gethostname(),
            driver=self.lab.driver,
            port=_free_port(self.lab.driver),
            folder=self.folder,
            silence=_SILENCE_S,
            grace=_PREEMPTION_GRACE_S,
            nodes=nodes,
        )
        self.config.write_text(config)
        gpu = self.folder / "nvidia3"
        os.mknod(gpu, stat.S_IFCHR, os.makedev(_UNUSED_MAJOR, 3))
        (self.folder / "gres.conf").write_text(f"NodeName=h1 Name=gpu Type=a100 File={gpu}\n")
        prolog = self.folder / "task_prolog"  # what it prints, Slurm sets for a job's processes
        prolog.write_text(
            f"#!/bin/sh\necho export CONTAINERS_CONF={self.lab.folder}/containers.conf\n"
        )
        prolog.chmod(0o755)
        (self.folder / "munge.key").write_bytes(os.urandom(64))
        (self.folder / "munge.key").chmod(0o400)
        self.start_munge()
        self._run("slurmctld", "-D", "-i", "-f", str(self.config))
        for one in self.lab.hosts:
            self.start_node(one.name)
        self.wait_until_idle()

    def start_munge(self) -> None:
        """Start the authentication service."""
        files = {name: self.folder / f"munge.{name}" for name in ("socket", "key", "pid", "log")}
        words = [
            "munged",
            "--foreground",
            "--force",
            f"--socket={files['socket']}",
            f"--key-file={files['key']}",
            f"--pid-file={files['pid']}",
            f"--log-file={files['log']}",
            f"--seed-file={self.folder / 'munge.seed'}",
        ]
        self._run(*words)
        _until(files["socket"].exists, "munged does not answer")

    def _run(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    dying_with_parent(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PATH": _path()},
                    start_new_session=True,
                )
            )

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        host = next(one for one in self.lab.hosts if one.name == name)
        command = host.inside("slurmd", "-D", "-N", name, "-f", str(self.config))
        with (self.folder / f"slurmd-{name}.out").open("ab") as log:
            self._nodes[name] = subprocess.Popen(
                dying_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": _path()},
                start_new_session=True,
            )

    def do(self, *command: str) -> str:
        """The output of one of Slurm's commands."""
        environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.config)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def update_node(self, name: str, state: str) -> None:
        """Set a node's state: down, drain, resume."""
        reason = [] if state == "resume" else ["reason=test"]
        self.do("scontrol", "update", f"nodename={name}", f"state={state}", *reason)

    def states(self) -> dict[str, str]:
        """The nodes' states, by name."""
        lines = self.do("sinfo", "-h", "-N", "-p", "work", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    def queue(self) -> list[str]:
        """The jobs, waiting and running: `id|name|partition|state|nodes`."""
        return self.do("squeue", "-h", "-o", "%i|%j|%P|%T|%N").splitlines()

    def wait_until_idle(self) -> None:
        """Wait until every node is idle and no job is left."""

        def idle() -> bool:
            with contextlib.suppress(OSError):
                return set(self.states().values()) == {"idle"} and not self.queue()
            return False

        _until(idle, "Slurm's nodes are not idle")

    def wait_for(self, **states: str) -> None:
        """Wait until these nodes have these states, such as h2="drained"; one that is silent has *.

        Slurm asks nodes now and then, and one of a busy machine may answer late.
        """
        _until(lambda: states.items() <= self.states().items(), f"Slurm's nodes are not {states}")

    def close(self) -> None:
        """End everything that runs beside the test process; the lab ends the nodes."""
        for one in [*self._nodes.values(), *reversed(self._processes)]:
            one.kill()
            one.wait()


def why_not() -> str | None:
    """Why a Slurm cluster is impossible here; None if it is possible."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"a Slurm cluster needs {', '.join(missing)}: make setup-system"
    return lab.why_not()


@contextlib.contextmanager
def running(hosts: int = 3) -> Iterator[SlurmLab]:
    """A cluster with so many nodes."""
    with lab.running(cores=[None] * hosts) as made:
        found = SlurmLab(made)
        try:
            found.start()
            yield found
        finally:
            found.close()


@pytest.fixture(scope="session")
def _slurm_cluster() -> Iterator[SlurmLab]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with running() as found:
        yield found


@pytest.fixture
def slurm(_slurm_cluster: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> SlurmLab:
    """The session's cluster, idle. Slurm's commands of this process use it."""
    monkeypatch.setenv("SLURM_CONF", str(_slurm_cluster.config))
    _slurm_cluster.wait_until_idle()
    return _slurm_cluster


def _until(condition: Callable[[], bool], otherwise: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise OSError(otherwise)
        time.sleep(0.05)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listening:
        return int(listening.getsockname()[1])


def _path() -> str:
    return f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"


__all__ = ["Path", "SlurmLab", "running", "slurm", "why_not"]
