"""Step `analyze`: compares the run with all earlier ones, and writes the report.

For a successful run it changes neither the status nor the lease, so the job may train meanwhile.
"""

from __future__ import annotations

from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.runs.artefacts.report_figures import Report
from trainwright.tasks.units import counted


def work(context: RunContext) -> Reference:
    """Analyse the run, and write its report."""
    from trainwright.tasks.analyze.history import analyze

    run = context.run
    report = analyze(run)
    return {
        "artefact": Report.FILE,
        "report": f"{run.uri}/{report.html}",
        "runs_compared": report.runs_compared,
    }


def summary(reference: Reference) -> str:
    """One line, as in `compared with 3 earlier runs`."""
    return compared(reference["runs_compared"])


def compared(count: int) -> str:
    """With how many earlier runs a run was compared, in words."""
    if not count:
        return "no earlier run to compare with"
    return f"compared with {counted(count, 'earlier run')}"
