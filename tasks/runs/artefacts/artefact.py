"""What all files of the run folder share."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trainwright.tasks.runs.value import Value


class Artefact(Value):
    """A file of the run folder."""

    FILE: ClassVar[str]
    schema_version: int = Field(default=1, description="version of the file's form")
