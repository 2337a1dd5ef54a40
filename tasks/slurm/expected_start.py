"""When Slurm would start the jobs of some hosts, as it says by `srun --test-only`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm import slurm_answers, slurm_commands
from trainwright.tasks.slurm.job_options import job_options
from trainwright.tasks.spec.pool import Device, Pool

_START = re.compile(r"Job \d+ to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) using", re.MULTILINE)


@dataclass(frozen=True)
class ExpectedStart:
    """In how many seconds the last of the hosts is expected; None: not known, and why."""

    after_s: float | None
    why: str = ""


def expected_start(pool: Pool, devices: Sequence[Device], settings: Settings) -> ExpectedStart:
    """When the hosts of these devices would start. Hosts of one kind are asked for together.

    Another kind's jobs are not counted, so that two kinds that compete for nodes may start later.
    Raises BadInput if the settings are wrong.
    """
    hosts = {host.name: host for host in pool.hosts}
    kinds: Counter[tuple[str, ...]] = Counter()
    for name in dict.fromkeys(one.host for one in devices):
        used = [one for one in devices if one.host == name]
        wanted = slurm_commands.options(pool, hosts[name], settings)
        kinds[tuple(job_options(hosts[name], used, wanted))] += 1
    latest = 0.0
    for options, count in kinds.items():
        nodes = (f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1")
        try:
            done = slurm_commands.finished(
                settings, "srun", "--test-only", *nodes, *options, "true"
            )
        except ServiceUnreachable as error:
            return ExpectedStart(None, str(error))
        found = start_after_s(done.stderr, datetime.now())
        if found.after_s is None:
            return found
        latest = max(latest, found.after_s)
    return ExpectedStart(latest)


def start_after_s(stderr: str, now: datetime) -> ExpectedStart:
    """What `srun --test-only` says."""
    found = _START.search(stderr)
    if found is None:
        return ExpectedStart(None, slurm_answers.why(stderr) or "srun --test-only says nothing")
    after = slurm_answers.until(found[1], now)
    if after is None:
        return ExpectedStart(None, "jobs without a time limit are before it")
    return ExpectedStart(after.total_seconds())
