"""Hosts that Slurm gives: the engine is srun, with one job of one node for each host.

One job per host, so that a lost node is one lost host: Slurm ends a job as a whole. `slurm_job`
runs srun so that a job ends with it. `slurm_answers` reads what Slurm's commands say.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import threading
import time
from collections.abc import Sequence

from trainwright.tasks.errors import BadInput, NotInstalled, ServiceUnreachable, TrainwrightError
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.train.hosts.host_engine import HostRequest, HostStanding
from trainwright.tasks.train.hosts.slurm import slurm_answers, slurm_job

ANSWER_S = 20.0
"""How long Slurm's controller may take to answer."""
_LOOK_EVERY_S = 2.0
# Not all of the launcher's environment, which has credentials.
_PASSED_ON = "HOME,USER,LOGNAME,PATH,LANG,LC_ALL"
_ONE_PROCESS = (
    *("--nodes=1", "--ntasks=1", f"--export={_PASSED_ON}"),
    *("--chdir=/", "--unbuffered", "--quiet"),
)


class SlurmEngine:
    """An `HostEngine` that runs one job of Slurm for each host."""

    silence_s = 15.0

    def __init__(self, pool: Pool, label: str) -> None:
        """`label` is in the jobs' names, for people."""
        self._pool, self._label = pool, label
        self._jobs: dict[str, str] = {}
        """the newest job's name, by host"""
        self._looking = threading.Lock()
        self._looked_at, self._found = -math.inf, dict[str, slurm_answers.QueuedJob]()
        self._answers = False

    def command(self, asked: HostRequest, words: Sequence[str]) -> list[str]:
        """As `HostEngine`: an srun process. Raises ServiceUnreachable if Slurm does not answer."""
        if not self._answers:
            self._ask()  # srun itself would try for ever
            self._answers = True
        name = slurm_job.new_name(f"trainwright-{self._label}-{asked.host.name}")
        self._jobs[asked.host.name] = name
        return [
            *slurm_job.ended_with_its_process(name),
            *("srun", f"--job-name={name}", *_ONE_PROCESS, *self._options(asked), "--", *words),
        ]

    def _options(self, asked: HostRequest) -> list[str]:
        wanted = self._pool.slurm_of(asked.host)
        of_host = [one for one in asked.devices if one.type in ("cpu", "emulated")]
        gpus = len(asked.devices) - len(of_host)
        cores = math.ceil(sum(one.cores or 1.0 for one in of_host))
        cpus = cores + gpus * (wanted.cpus_per_gpu or 1)
        options = {
            "cpus-per-task": str(cpus),
            "partition": wanted.partition,
            "constraint": wanted.constraint,
            "nodelist": wanted.node,
            "account": wanted.account,
            "qos": wanted.qos,
            "reservation": wanted.reservation,
        }
        if gpus:
            options["gres"] = f"{wanted.gres or 'gpu'}:{gpus}"
        if wanted.time_limit is not None:
            options["time"] = str(math.ceil(wanted.time_limit / 60))
        if asked.host.memory is not None:
            options["mem"] = f"{int(asked.host.memory) >> 20}M"
        return [f"--{name}={value}" for name, value in options.items() if value is not None]

    def standing(self, asked: HostRequest) -> HostStanding:
        """As `HostEngine`, by Slurm's queue, which is read every few seconds for all hosts."""
        with self._looking:
            if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
                # The controller may be restarting: then what it said last still holds.
                with contextlib.suppress(ServiceUnreachable):
                    self._found = self._ask()
                self._looked_at = time.monotonic()
            job = self._found.get(self._jobs[asked.host.name])
        if job is None or job.state not in slurm_answers.WAITING:
            return HostStanding("granted")
        if job.never_starts:
            return HostStanding("refused", job.reason)
        return HostStanding("queued", f"in Slurm's queue ({job.reason})", job.starts)

    def _ask(self) -> dict[str, slurm_answers.QueuedJob]:
        """This user's jobs. Raises ServiceUnreachable."""
        command = ["squeue", "--noheader", "--me", f"--format={slurm_answers.FORMAT}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=ANSWER_S, check=False
            )
        except FileNotFoundError:
            raise NotInstalled(
                "Slurm: squeue and srun are not installed on this machine; start trainwright on "
                "one that has them",
                service="slurm",
            ) from None
        except subprocess.TimeoutExpired:
            raise _unreachable(f"squeue had no answer in {ANSWER_S:g} s") from None
        if done.returncode != 0:
            raise _unreachable(slurm_answers.why(done.stderr) or f"squeue: {done.returncode}")
        return slurm_answers.waiting(done.stdout)

    def why_ended(self, stderr: str, code: int | None) -> str:
        """As `HostEngine`."""
        # srun's own exit code is 0 if the node has failed.
        return slurm_answers.why(stderr) or "its job in Slurm has ended"

    def out_of_memory(self, why: str) -> bool:
        """As `HostEngine`: never, because the kernel of a node ends single processes."""
        return False

    def error(self, asked: HostRequest, why: str) -> TrainwrightError:
        """As `HostEngine`: BadInput if Slurm refuses what the pool asks for."""
        if slurm_answers.is_refusal(why):
            return BadInput(
                f"host {asked.host.name}: Slurm refuses its job: {why}; got "
                f"{' '.join(self._options(asked))}; allowed: what `sinfo -o '%P %f %G %c %m'` shows"
            )
        return ServiceUnreachable(
            f"host {asked.host.name}: {why}", service="slurm", host=asked.host.name
        )

    def close(self) -> None:
        """As `HostEngine`: each job has ended with its process (`slurm_job`)."""


def _unreachable(why: str) -> ServiceUnreachable:
    return ServiceUnreachable(
        f"Slurm: {why}; start trainwright on a machine on which `squeue` works",
        service="slurm",
    )
