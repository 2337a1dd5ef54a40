"""The aliases of a job's models, such as `production`: `<store>/models/<job>/alias-<name>.json`."""

from __future__ import annotations

from pydantic import Field, ValidationError

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.spec.documents import one_line
from trainwright.tasks.storage.objects import ObjectStore


class Alias(Artefact):
    """The content of an alias: the run whose model it points at."""

    FILE = ""  # the key depends on job and alias
    alias: str
    job: str
    run: str = Field(description="URI of the run whose model the alias points at")
    metrics: dict[str, float]
    promoted_at: str
    previous: str | None = Field(default=None, description="the run that it pointed at before")


def alias_key(job_name: str, alias: str) -> str:
    """The key of an alias below the store."""
    return f"models/{job_name}/alias-{alias}.json"


def find_alias(root: ObjectStore, job_name: str, alias: str) -> tuple[Alias | None, str | None]:
    """An alias and its version tag; None and None if it does not exist. Raises CorruptArtefact."""
    key = alias_key(job_name, alias)
    try:
        data, version = root.get_versioned(key)
        return Alias.model_validate_json(data), version
    except FileNotFoundError:
        return None, None
    except ValidationError as error:
        raise CorruptArtefact(f"{root.uri}/{key}: {one_line(error)}") from error
