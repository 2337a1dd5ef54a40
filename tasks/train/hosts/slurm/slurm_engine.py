"""Hosts that Slurm gives: the engine is srun, with one job of one node for each host.

One job per host, so that a lost node is one lost host: Slurm ends a job as a whole. `slurm_job`
runs srun so that a job ends with it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from datetime import datetime

from trainwright.tasks.errors import BadInput, ServiceUnreachable, TrainwrightError
from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm import slurm_answers, slurm_commands, slurm_job
from trainwright.tasks.slurm.job_options import job_options
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.train.hosts.host_engine import HostRequest, HostStanding

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

    def __init__(self, pool: Pool, settings: Settings, label: str) -> None:
        """`label` is in the jobs' names, for people. Raises BadInput if the settings are wrong."""
        self._pool, self._settings, self._label = pool, settings, label
        self.variables = slurm_commands.variables(settings)
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
        wanted = slurm_commands.options(self._pool, asked.host, self._settings)
        return job_options(asked.host, asked.devices, wanted)

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
        return HostStanding("queued", job.in_words, job.starts)

    def _ask(self) -> dict[str, slurm_answers.QueuedJob]:
        """This user's jobs. Raises ServiceUnreachable."""
        format_ = f"--format={slurm_answers.FORMAT}"
        listed = slurm_commands.said(self._settings, "squeue", "--noheader", "--me", format_)
        return slurm_answers.waiting(listed, datetime.now())

    def why_ended(self, stderr: str, code: int | None) -> str:
        """As `HostEngine`."""
        # srun's own exit code is 0 if the node has failed.
        return slurm_answers.why(stderr) or "its job in Slurm has ended"

    def takes_back(self, stderr: str) -> bool:
        """As `HostEngine`: srun says so, also if the SIGTERM does not reach the agent.

        podman forwards a job's SIGCONT by a process of its own. Slurm ends that one too, by the
        SIGTERM that follows, and then podman forwards nothing more.
        """
        return slurm_answers.takes_back(stderr)

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
