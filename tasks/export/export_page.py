"""The page of an export: its figures, and a picture of what happens to a row."""

from __future__ import annotations

from html import escape
from urllib.parse import quote

from trainwright.tasks.export.readme import takes_single_columns
from trainwright.tasks.html_page import html_page, table, tiles
from trainwright.tasks.plots.colours import BACK, MUTED
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.export_report import CallTime, ExportReport
from trainwright.tasks.units import seconds, size

_BOX_WIDTH, _BOX_HEIGHT, _GAP = 190, 96, 44
_MOST_OPERATIONS = 3


def page(report: ExportReport, drawing: str) -> str:
    """The page, self-contained, with a drawing as SVG. All names that users chose are escaped."""
    of_circuit = report.kind == "rtl"
    sections = [
        f"<h1>{escape(report.kind)}</h1><p>{escape(report.run)}</p>",
        tiles(_figures(report)),
        f'<h2>Pipeline</h2><div class="wide" tabindex="0">{drawing}</div>',
        _circuits(report)
        if of_circuit
        else f"<h2>Inputs and outputs</h2>{_values(report)}{_nodes(report)}",
        f"<p>{escape('; '.join(report.notes))}</p>" if report.notes else "",
        f"<h2>Files</h2><p>{', '.join(map(_link, report.files))}</p>",
        f"<p>{escape(', '.join(_tools(report)))}</p>",
    ]
    return html_page(f"{report.kind} of {report.run}", "".join(sections))


def _link(file: str) -> str:
    """A link to a file beside the page."""
    return f'<a href="{quote(file)}">{escape(file)}</a>'


def _tools(report: ExportReport) -> list[str]:
    """The versions of the tools, and of the operators in an ONNX file."""
    opset = [] if report.opset is None else [f"ONNX opset {report.opset}"]
    return [*opset, *(f"{name} {version}" for name, version in report.tools.items())]


def _figures(report: ExportReport) -> list[tuple[str, str]]:
    found = [
        (f"{report.metrics.exported:.4f}", f"{report.metric}, exported"),
        (f"{report.metrics.trained:.4f}", f"{report.metric}, trained"),
        *_likeness(report),
        (f"{report.max_error:.1e}", "greatest relative difference of an output"),
    ]
    if report.vectors is not None:
        found.append((f"{report.mismatches:,}", f"mismatches in {report.vectors:,} vectors"))
    if (least := report.least_energy()) is not None:
        said = f"one inference by the {least.named}, estimated"
        found.append((f"{least.energy_j:.2g} J", escape(said)))
    if report.size_bytes is not None:
        found.append((size(report.size_bytes.exported), "size of the model"))
        if report.size_bytes.float != report.size_bytes.exported:
            ratio = report.size_bytes.float / report.size_bytes.exported
            found.append((f"{ratio:.2f} ×", f"smaller than {size(report.size_bytes.float)}"))
    if report.latency_s is not None:
        both, other = report.latency_s, "torch" if report.kind == "onnx" else "float ONNX"
        found += [
            (_time(both.exported), f"a batch of {both.batch_size}, one thread"),
            (_time(both.float), f"the same by {other}"),
        ]
    return found


def _likeness(report: ExportReport) -> list[tuple[str, str]]:
    """How alike the models decide: equal classes, or how far numbers are off."""
    off, rows = report.differences, f"{report.rows:,} validation rows"
    if off is None:
        return [(f"{100 * report.agreement:.2f} %", f"equal decisions on {rows}")]
    return [
        (f"{100 * off.median:.2g} %", "of the target's standard deviation: median difference"),
        (f"{100 * off.largest:.2g} %", f"of it: largest difference on {rows}"),
    ]


def _time(one: CallTime) -> str:
    return f"{seconds(one.median)} <small>({seconds(one.low)} to {seconds(one.high)})</small>"


def picture(report: ExportReport, schema: DataSchema) -> str:
    """The way of a row through the export, as SVG."""
    boxes = _boxes(report, schema)
    width = len(boxes) * (_BOX_WIDTH + _GAP) - _GAP + 2
    parts = []
    for number, (title, lines) in enumerate(boxes):
        left = 1 + number * (_BOX_WIDTH + _GAP)
        parts.append(
            f'<rect x="{left}" y="1" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8" '
            f'fill="{BACK}" stroke="#8d99ae"/>'
            f'<text x="{left + 12}" y="24" font-weight="600">{escape(title)}</text>'
        )
        parts += [
            f'<text x="{left + 12}" y="{46 + 18 * row}" fill="{MUTED}">{escape(line)}</text>'
            for row, line in enumerate(lines[:3])
        ]
        if number:
            middle = _BOX_HEIGHT / 2
            parts.append(
                f'<path d="M{left - _GAP + 4} {middle}h{_GAP - 14}m-7 -5l8 5l-8 5" fill="none" '
                f'stroke="{MUTED}" stroke-width="1.5"/>'
            )
    return (
        f'<svg viewBox="0 0 {width} {_BOX_HEIGHT + 2}" width="{width}" '
        f'font-family="system-ui, sans-serif" font-size="13" '
        'role="img" aria-label="the way of a row">'
        f"{''.join(parts)}</svg>"
    )


def _boxes(report: ExportReport, schema: DataSchema) -> list[tuple[str, list[str]]]:
    numbers = sum(one.dtype != "string" for one in report.inputs)
    texts = len(report.inputs) - numbers
    boxes: list[tuple[str, list[str]]] = []
    if takes_single_columns(report):
        lines = [f"{n} column(s) of {kind}" for n, kind in ((numbers, "numbers"), (texts, "texts"))]
        boxes.append(("row", [line for line in lines if not line.startswith("0 ")]))
        arrays = [f"{name}: {shape[0]}" for name, shape in schema.inputs.items()]
        boxes.append(("arrays", arrays))
    else:
        shapes = [f"{one.name}: {_shape(one.shape[1:])}" for one in report.inputs]
        boxes.append(("row", shapes))
    common = [f"{count} {kind}" for kind, count in list(report.operations.items())]
    more = sum(list(report.operations.values())[_MOST_OPERATIONS - 1 :])
    if len(common) > _MOST_OPERATIONS:
        common = [*common[: _MOST_OPERATIONS - 1], f"{more} other operations"]
    boxes.append(("model", common))
    first = report.outputs[:1]
    boxes.append(("output", [f"{one.dtype} {_shape(one.shape[1:]) or '1'}" for one in first]))
    if schema.classes and len(report.outputs) > 1:
        boxes.append(("label", [f"one of {len(schema.classes)} classes", "and its probability"]))
    return boxes


def _shape(shape: list[int | str]) -> str:
    return " × ".join(map(str, shape))


def _values(report: ExportReport) -> str:
    rows = [
        [what, escape(one.name), escape(one.dtype), escape(_shape(one.shape))]
        for what, values in (("input", report.inputs), ("output", report.outputs))
        for one in values
    ]
    return table(["", "name", "type", "shape"], rows, set())


def _nodes(report: ExportReport) -> str:
    rows = [[escape(kind), f"{count:,}"] for kind, count in report.operations.items()]
    kept = ", ".join(report.kept_float)
    said = f"<p>Kept in float: {escape(kept)}</p>" if kept else ""
    return f"<h2>Operations of the model</h2>{said}{table(['', 'number'], rows, {1})}"


def _circuits(report: ExportReport) -> str:
    """Cells, clock, latency and energy by circuit and FPGA."""
    rows = [
        [
            one.style,
            escape(one.device or one.family),
            f"{one.lookup_tables or 0:,}",
            f"{one.predicted or 0:,}",
            escape(f"{one.fmax_mhz:g} MHz" if one.fmax_mhz else one.note or ""),
            f"{one.latency_cycles or 0:,}",
            "" if one.energy_j is None else f"{one.energy_j:.2g} J",
        ]
        for one in report.cells
    ]
    head = ["circuit", "FPGA", "lookup tables", "predicted", "clock", "latency in cycles", "energy"]
    source = f"<p>Energy: {escape(report.energy_source or '')}</p>"
    return f"<h2>Circuits</h2>{table(head, rows, {2, 3, 5, 6})}{source}"
