"""`slurm` in a pool file: what trainwright asks of Slurm for each host.

One host is one job of Slurm on one node. A host's own values replace the pool's.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trainwright.tasks.spec.documents import Document, Duration, matching

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}$"
_NAMED = "1 to 128 letters, digits and _ . : -, not beginning with . : or -"


def _name(description: str) -> Any:
    return matching(_NAME, _NAMED, default=None, description=description)


class Slurm(Document):
    """Options of the job that takes a host; missing ones are Slurm's defaults."""

    partition: str | None = matching(
        r"^[A-Za-z0-9_][A-Za-z0-9_.,-]{0,255}$",
        "a partition, or several with commas between them, such as gpu,long",
        default=None,
        description="partition, or several with commas between them; Slurm takes the first free",
    )
    constraint: str | None = matching(
        r"^[A-Za-z0-9_(\[][A-Za-z0-9_.()\[\]&|*-]{0,255}$",
        "features of nodes as Slurm writes them, such as a100 or a100&nvlink",
        default=None,
        description="features that the node must have, such as a100 or a100&nvlink",
    )
    node: str | None = _name("the node; left out: any that meets the other options")
    gres: str | None = matching(
        r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?$",
        "Slurm's name of the GPUs without their number, such as gpu or gpu:a100",
        default=None,
        description="Slurm's name of the host's GPUs, without their number: gpu (default), "
        "gpu:a100",
    )
    cpus_per_gpu: int | None = Field(
        default=None, ge=1, le=1024, description="CPUs for each GPU; default: 1"
    )
    account: str | None = _name("account to which the jobs are charged")
    qos: str | None = _name("quality of service")
    reservation: str | None = _name("reservation in which the jobs run")
    time_limit: Duration | None = Field(
        default=None,
        description="after which Slurm ends a host's job, such as 12h; its training then continues "
        "on other hosts or a new job; default: the partition's",
    )

    def over(self, other: Slurm) -> Slurm:
        """These options, and the other's where these have none."""
        mine = {name for name in type(self).model_fields if getattr(self, name) is not None}
        return other.model_copy(update={name: getattr(self, name) for name in mine})
