"""A run's model as a value: its files, its entry, its configuration, and who gave it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainwright.estimator.trace.source import digest, snapshot
from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.spec.job import ModelSpec
from trainwright.tasks.storage.objects import ObjectStore

FOLDER = "source"
LISTING = f"{FOLDER}/source.json"


@dataclass(frozen=True)
class ModelSource:
    """The source of a model: `build_model(**config)` of the module `entry` among the files.

    `files` maps relative paths to contents. `origin` is `given` if the user named the model in
    the job, `recommended` if a step of the run chose it.
    """

    files: Mapping[str, bytes]
    entry: str
    config: Mapping[str, Any] = field(default_factory=dict)
    origin: Literal["given", "recommended"] = "given"

    @classmethod
    def given(cls, spec: ModelSpec) -> ModelSource:
        """The model that a job names, as its files are now. Raises BadInput if there is none."""
        entry, files = snapshot(spec.source)
        return cls(files, entry, spec.config)

    @property
    def sha256(self) -> str:
        """The SHA-256 over names and contents of the files."""
        return digest(dict(self.files))

    def unpack(self, folder: Path) -> Path:
        """Write the files below a folder. Returns the folder."""
        for name, data in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return folder


def write_model(objects: ObjectStore, model: ModelSource) -> None:
    """Put a model into a run's folder: the files, then the listing that makes them count."""
    for name, data in model.files.items():
        objects.put(f"{FOLDER}/{name}", data)
    listing = {
        "entry": model.entry,
        "config": dict(model.config),
        "origin": model.origin,
        "sha256": model.sha256,
        "files": sorted(model.files),
    }
    objects.put(LISTING, json.dumps(listing, indent=1).encode())


def find_model(objects: ObjectStore, config: Mapping[str, Any]) -> ModelSource | None:
    """The model in a run's folder; None if there is none yet. Raises CorruptArtefact if changed.

    `config` is used if the listing has none (listings of earlier versions).
    """
    try:
        listing = json.loads(objects.get(LISTING))
    except FileNotFoundError:
        return None
    except ValueError:
        raise CorruptArtefact(
            f"{objects.uri}/{LISTING}: not JSON; --new starts a new run"
        ) from None
    try:
        model = ModelSource(
            files={name: objects.get(f"{FOLDER}/{name}") for name in listing["files"]},
            entry=str(listing["entry"]),
            config=listing.get("config", config),
            origin=listing.get("origin", "given"),
        )
        whole = model.sha256 == listing["sha256"]
    except (FileNotFoundError, KeyError, TypeError):
        whole = False
    if not whole:
        raise CorruptArtefact(
            f"{objects.uri}/{FOLDER}: changed since the run was created (sha256 differs); "
            "--new starts a new run"
        )
    return model
