"""What all files of the run folder share."""

from __future__ import annotations

from typing import ClassVar

from trainwright.tasks.runs.value import Value


class Artefact(Value):
    """A file of the run folder."""

    FILE: ClassVar[str]
    schema_version: int = 1
