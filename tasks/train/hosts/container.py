"""Runs the words of a host's process in a container there. Any engine carries the result.

The process keeps its standard input and output (`run --interactive`), so the agent ends when the
stream ends, and the container with it. Images are never pulled: a launch waits for no registry.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainwright.infra.cpu_share import MOST_SHARES, shares_of
from trainwright.tasks.spec.container_spec import Container
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.train.hosts.versions import IMAGE
from trainwright.tasks.train.request import TrainRequest

PYTHON = "python"
"""The Python in an image, if the pool names none: the first in its path."""
_NOT_STARTED = 125
"""The exit code of podman and docker for a container that could not be started."""
_OWN_ERROR = re.compile(r"Error: |docker: |Error response from daemon: ")
# The image's id is known only to the host. All hosts with the same id run the same files.
_ID = (
    'id=$({runtime} image inspect --format "{{{{.Id}}}}" "$1") || exit {code}; shift; '
    'set -- --env {variable}="$id" "$@"; '
)
# A job's limits by Slurm do not hold in a container, which has a control group of its own.
_RUN = 'exec {runtime} run ${{SLURM_CPUS_PER_TASK:+--cpus $SLURM_CPUS_PER_TASK}} "$@"'
_PASSED_ON = (
    *("SSH_CONNECTION", "SLURM_LAUNCH_NODE_IPADDR", "SLURMD_NODENAME"),
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
"""Who connected, and which node and GPUs a cluster gave, if it did."""


def in_images(request: TrainRequest) -> bool:
    """Whether ranks run in an image: in a container on their host, or in a pod."""
    away = {device.host for device in request.plan.devices if not device.local}
    pool = load_pool(request.job.pool)
    return any(
        pool.engine == "kubernetes" or pool.container_of(host) is not None
        for host in pool.hosts
        if host.name in away
    )


def contained(
    container: Container | None, words: Sequence[str], host_memory: float | None = None
) -> list[str]:
    """The words that run `words` in a container; without one, `words` themselves.

    A container without `memory` may use `host_memory`, in bytes.
    """
    if container is None:
        return list(words)
    memory = container.memory or host_memory
    options = ["--rm", "--interactive", "--network", "host"]
    # with an ordinary weight, a rank's threads queue behind other programs of the host
    shares = MOST_SHARES if container.cpus is None else shares_of(container.cpus)
    options += ["--cpu-shares", str(shares)]
    options += [word for name in _PASSED_ON for word in ("--env", name)]
    if container.cpus is not None:
        options += ["--cpus", f"{container.cpus:g}"]
    if memory is not None:
        # no swap, so that a rank beyond the memory ends instead of becoming slow
        size = f"{int(memory)}b"
        options += ["--memory", size, "--memory-swap", size]
    for device in container.devices:
        options += ["--device", device]
    for folder, place in container.volumes.items():
        options += ["--volume", f"{folder}:{place}"]
    run = _RUN.format(runtime=container.runtime)
    if container.image.startswith("/"):
        return ["sh", "-c", run, "sh", *options, "--rootfs", container.image, *words]
    script = _ID.format(runtime=container.runtime, code=_NOT_STARTED, variable=IMAGE) + run
    given = [container.image, "--pull", "never", *options, container.image]
    return ["sh", "-c", script, "sh", *given, *words]


def why_not_started(container: Container | None, stderr: str, code: int | None) -> str | None:
    """What the runtime says if it could not start the container, else None."""
    if container is None or code not in (_NOT_STARTED, 126, 127):
        return None
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    own = [line for line in lines if _OWN_ERROR.match(line)]  # an engine may say more after it
    why = (own or lines or [f"exit code {code}"])[-1]
    return f"container: {container.runtime} can't run {container.image} there ({why})"
