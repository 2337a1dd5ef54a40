"""Reads what Slurm's commands say: `squeue`, and the errors of `srun`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

FORMAT = "%i|%T|%S|%r|%j"
"""squeue's format of a job: its number, state, (expected) start, why it waits, and its name.

The name is last because other programs' jobs may have a `|` in theirs.
"""
WAITING = ("PENDING", "CONFIGURING")
# Reasons for which a job waits until someone changes it: no node can ever take it.
_NEVER = re.compile(
    r"BadConstraints|PartitionConfig|PartitionNodeLimit|PartitionTimeLimit|InvalidAccount|"
    r"InvalidQOS|\w+Max\w+PerJob\w*|AssocGrp\w+MinutesLimit|Job's (account|QOS) not .*"
)
_REFUSALS = re.compile(
    r"nvalid (partition|feature|account|qos|node name|user id|generic resource|reservation|"
    r"time limit|job array|constraint)|configuration (is )?not available|can not be satisfied|"
    r"[Aa]ccess(/permission)? denied|not permitted|permission denied|limits? (has been )?exceeded|"
    r"violates accounting|[Rr]equested time limit|Job's? (account|QOS)|" + _NEVER.pattern
)
_NOISE = re.compile(
    r"^srun: (job \d+ |Force Terminated|Job step aborted|forcing job termination|"
    r"Terminating|launch/slurm: _step_signal)|^\w+: error: If munged is up"
)
_ENDLESS = timedelta(days=180)
"""Slurm takes a job without a time limit for one of a year."""
_CANCELLED = re.compile(
    r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+(?: (?:DUE TO )?(.+?))? \*\*\*"
)


@dataclass(frozen=True)
class QueuedJob:
    """A job in Slurm's queue; one that runs is in it too."""

    number: str
    state: str
    starts: str
    """when it is expected to; empty: not known"""
    reason: str

    @property
    def in_words(self) -> str:
        """Where it is, as in `in Slurm's queue: job 12 (Resources)`."""
        return f"in Slurm's queue: job {self.number} ({self.reason})"

    @property
    def never_starts(self) -> bool:
        """Whether no node of the cluster can take it as it is."""
        return _NEVER.fullmatch(self.reason) is not None


def until(start: str, now: datetime) -> timedelta | None:
    """The time until a start that Slurm expects; None if it only ends jobs without a time limit.

    Slurm's times are this machine's local ones, without a zone.
    """
    after = datetime.fromisoformat(start) - now
    return None if after > _ENDLESS else max(after, timedelta())


def waiting(listed: str, now: datetime) -> dict[str, QueuedJob]:
    """The jobs that squeue lists, by name."""
    found = {}
    for line in listed.splitlines():
        fields = line.split("|", 4)
        if len(fields) < 5:  # the rest of a name with a line break, which none of ours has
            continue
        number, state, starts, reason, name = fields
        if starts == "N/A" or until(starts, now) is None:
            starts = ""
        found[name] = QueuedJob(number, state, starts, reason.strip())
    return found


def why(stderr: str) -> str:
    """What an error of a Slurm command says, in one line; empty if it says nothing."""
    reasons = [one[1] for one in _CANCELLED.finditer(stderr) if one[1]]
    if reasons and reasons[-1] != "DUE TO":
        return f"Slurm ended its job: {reasons[-1].partition(',')[0].lower()}"
    lines = [one.strip() for one in stderr.splitlines() if one.strip() and not _NOISE.match(one)]
    allocation = [one for one in lines if "nable to allocate resources: " in one]
    munge = [one for one in lines if "unge" in one]
    # The last line is the most general one; munge is named above it.
    chosen = munge[:1] or allocation[-1:] or lines[-1:]
    if not chosen:
        return ""
    return re.sub(
        r"^\w+: ((fatal|error): )*(Unable to allocate resources: )?|^slurm_\w+ error: |"
        r"^allocation failure: ",
        "",
        chosen[0],
    )


def takes_back(stderr: str) -> bool:
    """Whether a Slurm command says that its step is being ended, but not by a failed node."""
    reasons = [one[1] or "" for one in _CANCELLED.finditer(stderr)]
    return any(not reason.startswith("NODE FAILURE") for reason in reasons)


def is_refusal(why: str) -> bool:
    """Whether an error says that Slurm does not take the job, whatever is free."""
    return _REFUSALS.search(why) is not None
