"""A run's exports that are sealed: their reports and files."""

from __future__ import annotations

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.runs.artefacts.export_report import EXPORT_FOLDER, ExportReport
from trainwright.tasks.runs.artefacts.run_status import Manifest
from trainwright.tasks.runs.run import Run


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
        content = _verified(run, folder, ExportReport.FILE)
        try:
            found.append(ExportReport.model_validate_json(content, extra="ignore"))
        except ValueError:
            raise _damaged(run, f"{folder}/{ExportReport.FILE}") from None
    return sorted(found, key=lambda one: one.kind)


def exported_file(run: Run, kind: str, name: str) -> bytes:
    """A file of a sealed export, or its manifest.

    Raises FileNotFoundError if the run has no such export or file, CorruptArtefact for a file that
    is not the sealed one.
    """
    made = {one.kind: one for one in sealed_exports(run)}
    listed = made[kind].files if kind in made else ()
    if name not in (*listed, Manifest.FILE):
        raise FileNotFoundError(f"{run.uri} has no export {kind} with a file {name}")
    folder = f"{EXPORT_FOLDER}{kind}"
    if name == Manifest.FILE:
        return run.objects.get(f"{folder}/{name}")
    return _verified(run, folder, name)


def _verified(run: Run, folder: str, name: str) -> bytes:
    """A file of a sealed export's folder. Raises CorruptArtefact."""
    try:
        return run.objects.get(f"{folder}/{name}")
    except FileNotFoundError:
        raise _damaged(run, f"{folder}/{name}") from None


def _damaged(run: Run, key: str) -> CorruptArtefact:
    return CorruptArtefact(
        f"{run.uri}/{key}: missing or damaged; `trainwright export` makes it again"
    )
