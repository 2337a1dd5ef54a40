"""The files that clients may name: model sources, pools and data in folders that the service was told to serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainwright.tasks.errors import BadInput
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import DataSpec
from trainwright.tasks.spec.pool import Pool, load_pool


class NotServed(BadInput):
    """A name that nothing in the served folders has."""


class ServedFiles:
    """Folders to read from; relative paths are relative to the folder of jobs, as in a job file there."""

    def __init__(self, settings: Settings, folders: Sequence[Path] = ()) -> None:
        self._jobs, self._pools = settings.jobs.resolve(), settings.pools.resolve()
        self._folders = [self._jobs, self._pools, *(folder.resolve() for folder in folders)]

    def file(self, name: str, field: str) -> Path:
        """The file or folder of this name. Raises NotServed where it is not in a served folder."""
        try:
            path = (self._jobs / name).resolve()
            there = any(path.is_relative_to(folder) for folder in self._folders) and path.exists()
        except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL, a name too long
            there = False
        if not there:
            raise NotServed(
                f"{field}: got {name[:200]}; there is no such file in a folder that the service serves"
            )
        return path

    def pool(self, name: str | None) -> Pool:
        """A pool by its name in the folder of pools, or by its path; without one, the server's machine.

        Raises NotServed where there is none, BadInput where the file is wrong.
        """
        if name is None:
            return load_pool(None)
        if "/" in name or name.endswith((".yaml", ".yml", ".json")):
            return load_pool(self.file(name, "pool"))
        known = {path.stem: path for path in sorted(self._pools.glob("*.yaml"))}
        if name not in known:
            raise NotServed(f"pool: got {name[:200]}; allowed: {', '.join(known)}")
        return load_pool(known[name])

    def names(self) -> tuple[list[str], list[str]]:
        """The pools and the models' sources that stand in the folders of pools and of jobs."""
        return sorted(path.stem for path in self._pools.glob("*.yaml")), sorted(
            path.name for path in self._jobs.glob("*.py")
        )

    def source(self, name: str) -> Path:
        """A model's source."""
        if not name.endswith(".py"):
            raise BadInput(
                f"model.source: got {name[:200]}; allowed: a file path/to/model.py in a served folder, or files"
            )
        return self.file(name, "model.source")

    def data(self, spec: DataSpec) -> DataSpec:
        """The data, its path absolute."""
        if spec.uri.startswith(("builtin:", "s3://")):
            return spec
        path = self.file(spec.uri.removeprefix("file://"), "data.uri")
        return spec.model_copy(update={"uri": str(path)})
