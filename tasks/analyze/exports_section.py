"""The report's section on exports, which is made again when the report is saved later."""

from __future__ import annotations

from html import escape

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.html_page import table
from trainwright.tasks.runs.artefacts.export_report import (
    EXPORT_FOLDER,
    EXPORT_PAGE,
    ExportReport,
)
from trainwright.tasks.runs.exports import sealed_exports
from trainwright.tasks.runs.run import Run
from trainwright.tasks.units import metric, size

_BEGIN, _END = "<!-- exports -->", "<!-- end of exports -->"


def exports_section(run: Run) -> str:
    """The sealed exports of a run: metrics, size, address; between two comments."""
    try:
        found = sealed_exports(run)
    except CorruptArtefact as error:
        return f"{_BEGIN}<h2>Exports</h2><p>{escape(str(error))}</p>{_END}"
    rows = [
        [
            escape(one.kind),
            escape(one.metric),
            metric(one.metrics.trained),
            metric(one.metrics.exported),
            _size(one),
            _address(run, one),
        ]
        for one in found
    ]
    columns = ["kind", "metric", "trained", "exported", "size", "page"]
    shown = f"<h2>Exports</h2>{table(columns, rows, {2, 3, 4})}" if rows else ""
    return f"{_BEGIN}{shown}{_END}"


def with_exports(content: bytes, run: Run) -> bytes:
    """A report with the exports that the run has now. One without that section stays as it is."""
    head, begin, rest = content.partition(_BEGIN.encode())
    _, end, tail = rest.partition(_END.encode())
    return head + exports_section(run).encode() + tail if begin and end else content


def _size(report: ExportReport) -> str:
    if report.size_bytes is None:
        return "–"
    exported, other = report.size_bytes.exported, report.size_bytes.float
    return size(exported) if exported == other else f"{size(exported)}, float {size(other)}"


def _address(run: Run, report: ExportReport) -> str:
    """The page of an export: a link, if a browser can read the store."""
    uri = escape(f"{run.uri}/{EXPORT_FOLDER}{report.kind}/{EXPORT_PAGE}")
    return f'<a href="{uri}">{uri}</a>' if uri.startswith("file:") else uri
