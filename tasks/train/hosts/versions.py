"""What a rank's results depend on besides its order: Python, the libraries, trainwright's sources.

This file's text also runs on other hosts before anything of trainwright is imported there, so it
uses only the standard library. `differences` compares two machines.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("estimator", "infra", "tasks")
DISTRIBUTIONS = ("trainwright", "torch", "numpy", "horovod")
IMAGE = "TRAINWRIGHT_IMAGE"
"""The variable with the id of the container's image."""
CAME_BY = "TRAINWRIGHT_CAME_BY"
"""The variable with a connection that ssh did not make, in the form of its SSH_CONNECTION."""


def facts() -> dict[str, Any]:
    """Versions, the SHA-256 of trainwright's sources, image, node of a cluster, GPUs that it
    gave, and the address that it was started from.

    The SHA-256 is None if trainwright is not installed; the others are empty without one.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "versions": versions,
        "sources": sources_sha256(),
        "image": os.environ.get(IMAGE, ""),
        "node": os.environ.get("SLURMD_NODENAME", ""),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")
        or os.environ.get("ROCR_VISIBLE_DEVICES", ""),
        "came_by": os.environ.get(CAME_BY)
        or os.environ.get("SSH_CONNECTION")
        or os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""),
    }


def sources_sha256() -> str | None:
    """One SHA-256 over the names and contents of the modules that ranks run."""
    whole = hashlib.sha256()
    for package in PACKAGES:
        try:
            spec = importlib.util.find_spec(f"trainwright.{package}")
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.origin is None:
            return None
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            data = path.read_bytes()
            whole.update(
                f"{package}/{path.relative_to(root).as_posix()}\0{len(data)}\0".encode() + data
            )
    return whole.hexdigest()


def same_image(hosts: Sequence[dict[str, Any]]) -> bool:
    """Whether the processes of all these hosts run in containers of one image."""
    images = {there["image"] for there in hosts}
    return len(images) == 1 and images != {""}


def differences(
    here: dict[str, Any], there: dict[str, Any], backend: str, *, one_image: bool = False
) -> list[str]:
    """The differences, each as `what: here, there`. Horovod's counts only if it is the backend.

    With `one_image`, all ranks run in containers of one image, whose versions may be others than
    this machine's, but for Horovod's, with which this machine speaks.
    """
    found = []
    if there["sources"] is None:
        return ["trainwright is not installed on that host"]
    compared = here["versions"]
    if one_image:
        compared = {"horovod": compared["horovod"]}
    for name, version in compared.items():
        other = there["versions"].get(name)
        if version != other and (name != "horovod" or backend == "horovod"):
            found.append(
                f"{name}: {version or 'not installed'} here, {other or 'not installed'} there"
            )
    if here["sources"] != there["sources"]:
        found.append(
            f"trainwright's sources: sha256 {here['sources'][:12]}… here, "
            f"{there['sources'][:12]}… there"
        )
    return found
