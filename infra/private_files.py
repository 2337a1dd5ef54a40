"""Files and folders that only their owner may access."""

from __future__ import annotations

import os
from pathlib import Path


def keep_private() -> None:
    """Let only their owner use the files and folders that this process and its children make."""
    os.umask(0o077)


def private_folder(path: Path) -> Path:
    """Create a folder that only its owner may open, and so its missing parents."""
    new_private_folders(path)
    path.chmod(0o700)
    return path


def new_private_folders(path: Path) -> Path:
    """Create a folder and its missing parents, which only their owner may open.

    A folder that exists keeps its mode: its owner may have shared it.
    """
    for folder in reversed((path, *path.parents)):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
    return path


def write_private(path: Path, content: str) -> None:
    """Write a file that only its owner may read. A reader sees the old content or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
    part.replace(path)
