"""Step `export`: writes the finished model in the forms that the job's `export` names.

An export that is sealed already is not made again. For a successful run the step changes neither
the status nor the lease.
"""

from __future__ import annotations

from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.runs.artefacts.export_report import Exports
from trainwright.tasks.runs.exports import sealed_exports
from trainwright.tasks.spec.export_spec import ExportKind


def work(context: RunContext) -> Reference:
    """Make the exports that are missing."""
    run = context.run
    kinds: list[ExportKind] = [*dict.fromkeys(run.job().export.to)]
    if kinds:
        from trainwright.tasks.export.export_run import checked_kind, export_run

        for kind in kinds:
            checked_kind(kind)
        made = {one.kind for one in sealed_exports(run)}
        for kind in kinds:
            if kind not in made:
                export_run(run, kind)
    run.write(Exports(kinds=kinds))
    return {"artefact": Exports.FILE, "kinds": kinds}


def summary(reference: Reference) -> str:
    """One line, as in `exported as onnx`."""
    kinds = reference["kinds"]
    return f"exported as {', '.join(kinds)}" if kinds else "nothing to export"
