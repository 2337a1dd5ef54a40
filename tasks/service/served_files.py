"""The files that a request may name: models, pools and data in the served folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainwright.estimator.near_names import meant
from trainwright.tasks.errors import BadInput
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.pool import Pool, load_pool


class NotServed(BadInput):
    """The served folders have no such file."""


class ServedFiles:
    """The folders of jobs, of pools, and others. Paths are relative to the folder of jobs."""

    def __init__(self, settings: Settings, folders: Sequence[Path] = ()) -> None:
        self._jobs, self._pools = settings.jobs.resolve(), settings.pools.resolve()
        self._folders = [self._jobs, self._pools, *(folder.resolve() for folder in folders)]

    def file(self, name: str, field: str) -> Path:
        """The file or folder with this name. Raises NotServed if no served folder has it."""
        try:
            path = (self._jobs / name).resolve()
            there = any(path.is_relative_to(folder) for folder in self._folders) and path.exists()
        except (OSError, RuntimeError, ValueError):  # a cycle of links, a NUL, or a name too long
            there = False
        if not there:
            raise NotServed(f"{field}: got {name[:200]}; the served folders have no such file")
        return path

    def pool(self, name: str | None) -> Pool:
        """A pool, by its name in the folder of pools or by its path; by default the local machine.

        Raises NotServed if there is no such pool, BadInput if its file is wrong.
        """
        if name is None:
            return load_pool(None)
        if "/" in name or name.endswith((".yaml", ".yml", ".json")):
            return load_pool(self.file(name, "pool"))
        known = {path.stem: path for path in sorted(self._pools.glob("*.yaml"))}
        if name not in known:
            raise NotServed(
                f"pool: got {name[:200]}; allowed: {', '.join(known)}{meant(name, known)}"
            )
        return load_pool(known[name])

    def names(self) -> tuple[list[str], list[str]]:
        """The names of the pools and of the models, in the folders of pools and of jobs."""
        pools = sorted(path.stem for path in self._pools.glob("*.yaml"))
        return pools, sorted(path.name for path in self._jobs.glob("*.py"))

    def source(self, name: str) -> Path:
        """The file of a model's source. Raises BadInput."""
        if not name.endswith(".py"):
            raise BadInput(
                f"model.source: got {name[:200]}; allowed: a path/to/model.py in a served folder, "
                "or model.files"
            )
        return self.file(name, "model.source")

    def data(self, spec: DataSpec) -> DataSpec:
        """The data with an absolute path. Raises NotServed."""
        if spec.uri.startswith(("builtin:", "s3://")):
            return spec
        path = self.file(spec.uri.removeprefix("file://"), "data.uri")
        return spec.model_copy(update={"uri": str(path)})
