"""Files and folders that only their owner may access."""

from __future__ import annotations

import os
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Create a folder that only its owner may open."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def write_private(path: Path, content: str) -> None:
    """Write a file that only its owner may read. A reader sees the old content or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
    part.replace(path)
