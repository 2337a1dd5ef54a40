"""A package that is installed for a test: a folder on the path, with entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path, modules: Mapping[str, str], group: str, entry_points: Mapping[str, str]
) -> None:
    """Write the modules of a package, and its metadata with these entry points of one group."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{folder.name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 1.0\n"
    )
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
