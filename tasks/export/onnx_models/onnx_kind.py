"""The kinds `onnx` and `onnx-int8`: a model that takes a row's columns if the data is a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.tasks.export.exportable import Exportable, ExportOptions
from trainwright.tasks.export.model_sandbox import model_request, run_in_sandbox
from trainwright.tasks.export.onnx_models.example_rows import write_example
from trainwright.tasks.runs.artefacts.export_report import ExportReport

FILE = "model.onnx"
PROCESS = "trainwright.tasks.export.onnx_models.onnx_process:answer"


def to_onnx(model: Exportable, folder: Path, options: ExportOptions) -> ExportReport:
    """Write model.onnx and an example into a folder.

    Raises BadInput for a model that can't be converted.
    """
    request = request_of(model, options, "onnx")
    found = run_in_sandbox(PROCESS, request, model, options.limits, folder / FILE)
    write_example(model, found, folder)
    return ExportReport(kind="onnx", **report_fields(model, found))


def to_onnx_int8(model: Exportable, folder: Path, options: ExportOptions) -> ExportReport:
    """Write model.onnx with layers in 8-bit integers, and an example, into a folder.

    Raises BadInput for a model that can't be converted, or none within the tolerance.
    """
    request = request_of(model, options, "onnx-int8")
    found = run_in_sandbox(PROCESS, request, model, options.limits, folder / FILE)
    write_example(model, found, folder)
    return ExportReport(
        kind="onnx-int8",
        tolerance=options.tolerance,
        kept_float=found["kept_float"],
        fine_tuned=found["fine_tuned"],
        **report_fields(model, found),
    )


def request_of(model: Exportable, options: ExportOptions, kind: str) -> dict[str, Any]:
    """What the sandboxed process gets."""
    return model_request(model) | {
        "kind": kind,
        "run": model.run_uri,
        "data_sha256": model.data_sha256,
        "tolerance": options.tolerance,
        "fine_tune": options.fine_tune,
    }


def report_fields(model: Exportable, found: dict[str, Any]) -> dict[str, Any]:
    """The fields of a report that all ONNX kinds have, from the process's figures."""
    float_bytes = found.get("float_bytes", found["size_bytes"])
    notes = []
    if model.precision in ("bf16", "amp"):
        notes.append(f"trained in {model.precision}; exported, and compared, in fp32")
    return {
        "run": model.run_uri,
        "data_sha256": model.data_sha256,
        "files": [FILE],
        "metric": model.metric,
        "metrics": {"trained": model.trained, "exported": found["metric_value"]},
        "size_bytes": {"float": float_bytes, "exported": found["size_bytes"]},
        "differences": found.get("differences"),
        "notes": [*notes, *found.get("notes", [])],
        **{
            name: found[name]
            for name in (
                "agreement",
                "max_error",
                "rows",
                "opset",
                "inputs",
                "outputs",
                "operations",
                "latency_s",
                "tools",
            )
        },
    }
