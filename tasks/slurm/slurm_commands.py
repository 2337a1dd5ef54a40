"""Runs Slurm's commands on this machine, with what the settings say of the cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from trainwright.tasks.errors import BadInput, NotInstalled, ServiceUnreachable
from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm import slurm_answers, slurm_job
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.host_spec import Host
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.spec.slurm_spec import Slurm

ANSWER_S = 20.0
"""How long Slurm's controller may take to answer."""


def said(settings: Settings, *command: str) -> str:
    """What a command prints. Raises NotInstalled or ServiceUnreachable."""
    done = finished(settings, *command)
    if done.returncode != 0:
        raise unreachable(f"{command[0]}: {slurm_answers.why(done.stderr) or done.returncode}")
    return done.stdout


def finished(settings: Settings, *command: str) -> subprocess.CompletedProcess[str]:
    """A command that has ended, well or not. Raises NotInstalled or ServiceUnreachable."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
            env=slurm_job.own_environment(os.environ) | variables(settings),
        )
    except FileNotFoundError:
        raise NotInstalled(
            f"Slurm: {command[0]} is not installed on this machine; start trainwright on one that "
            "has Slurm's commands",
            service="slurm",
        ) from None
    except subprocess.TimeoutExpired:
        raise unreachable(f"{command[0]} had no answer in {ANSWER_S:g} s") from None


def unreachable(why: str) -> ServiceUnreachable:
    """The error for a Slurm that does not answer."""
    return ServiceUnreachable(
        f"Slurm: {why}; start trainwright on a machine on which `squeue` works", service="slurm"
    )


def variables(settings: Settings) -> dict[str, str]:
    """The environment variables of Slurm's commands that the settings set. Raises BadInput."""
    file = settings.slurm_config
    if file is None:
        return {}
    if not Path(file).is_file():
        raise BadInput(f"TRAINWRIGHT_SLURM_CONFIG: got {file}; there is no such file")
    return {"SLURM_CONF": file}


def options(pool: Pool, host: Host, settings: Settings) -> Slurm:
    """What to ask of Slurm for a host: its own options, else the pool's, else the settings'.

    Raises BadInput.
    """
    given = validated(Slurm, settings.slurm_options(), "TRAINWRIGHT_SLURM_*")
    return pool.slurm_of(host).over(given)
