"""A run's exports: those that are sealed."""

from __future__ import annotations

import json

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.runs.artefacts.export_report import EXPORT_FOLDER, ExportReport
from trainwright.tasks.runs.artefacts.run_status import Manifest
from trainwright.tasks.runs.run import Run
from trainwright.tasks.storage.objects import get_verified


def sealed_exports(run: Run) -> list[ExportReport]:
    """The reports of a run's sealed exports, in the order of their kinds' names.

    Raises CorruptArtefact for a report that can't be read, or is not the sealed one.
    """
    keys = {item.key for item in run.objects.list(EXPORT_FOLDER)}
    found = []
    for key in sorted(keys):
        folder, _, name = key.rpartition("/")
        if name != Manifest.FILE:
            continue
        where = f"{folder}/{ExportReport.FILE}"
        try:
            sealed = json.loads(run.objects.get(key))["files"][ExportReport.FILE]["sha256"]
            content = get_verified(run.objects, where, sealed)
            found.append(ExportReport.model_validate_json(content, extra="ignore"))
        except (FileNotFoundError, CorruptArtefact, KeyError, TypeError, ValueError):
            raise CorruptArtefact(
                f"{run.uri}/{where}: missing or damaged; `trainwright export` makes it again"
            ) from None
    return sorted(found, key=lambda one: one.kind)
