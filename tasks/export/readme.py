"""The README of an export: what its files are, and three programs that use them.

Each program is a block of Python code that begins with a comment, its file's name. They read the
example that the kind has written.
"""

from __future__ import annotations

from pathlib import Path

from trainwright.tasks.export.exportable import Exportable
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.export_report import EXPORT_README, ExportReport

_EXAMPLE_TABLE = " `example.csv` has the same rows."
_IN_MEMORY = """
```python
# predict_rows.py: rows in memory
import numpy as np
import onnxruntime

model = onnxruntime.InferenceSession("model.onnx")
kinds = {
    "tensor(string)": object,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
}
example = np.load("example.npz")
rows = {one.name: example[one.name].astype(kinds[one.type]) for one in model.get_inputs()}
outputs = model.run(None, rows)
for value, found in zip(model.get_outputs(), outputs):
    print(value.name, found.tolist())
    print("expected", example[value.name].tolist())
```
"""
_FROM_FILE = """
```python
# predict_file.py: $what
import csv
import sys

import numpy as np
import onnxruntime

model = onnxruntime.InferenceSession("model.onnx")
$rows
names = [one.name for one in model.get_outputs()]
found = [np.asarray(one).tolist() for one in model.run(names, rows)]
writer = csv.writer(sys.stdout)
writer.writerow(names)
writer.writerows(zip(*found))
```
"""
_TABLE_SAID = "a CSV file with the columns of the model, in any order"
_TABLE_FILE = """path = sys.argv[1] if len(sys.argv) > 1 else "example.csv"
with open(path, newline="", encoding="utf-8") as file:
    table = list(csv.DictReader(file))
absent = [one.name for one in model.get_inputs() if table and one.name not in table[0]]
if absent:
    sys.exit(f"{path}: has no columns {', '.join(absent)}, which the model reads")
rows = {}
for column in model.get_inputs():
    values = [row[column.name] for row in table]
    if column.type == "tensor(string)":
        rows[column.name] = np.array(values, dtype=object)
    else:
        wide = np.float64 if column.type == "tensor(double)" else np.float32
        rows[column.name] = np.array([float(one or "nan") for one in values], dtype=wide)"""
_ARRAYS_SAID = "an .npz file with the arrays of the model, rows first"
_ARRAY_FILE = """arrays = np.load(sys.argv[1] if len(sys.argv) > 1 else "example.npz")
kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
rows = {one.name: arrays[one.name].astype(kinds[one.type]) for one in model.get_inputs()}"""
_SERVER = """
```python
# serve.py: answers POST requests with JSON; python serve.py [PORT]
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import onnxruntime

model = onnxruntime.InferenceSession("model.onnx")
kinds = {
    "tensor(string)": object,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        try:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            rows = {
                one.name: np.array(given[one.name], dtype=kinds[one.type])
                for one in model.get_inputs()
            }
            names = [one.name for one in model.get_outputs()]
            found = zip(names, model.run(names, rows))
            status, answer = 200, {name: one.tolist() for name, one in found}
        except Exception as error:
            status, answer = 400, {"error": f"{type(error).__name__}: {error}"}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
```
"""


def write_readme(report: ExportReport, model: Exportable, folder: Path) -> None:
    """Write README.md into an export's folder."""
    (folder / EXPORT_README).write_text(_text(report, model.schema))


def takes_single_columns(report: ExportReport) -> bool:
    """Whether every input is one column of a table."""
    return bool(report.inputs) and all(len(one.shape) == 1 for one in report.inputs)


def _text(report: ExportReport, schema: DataSchema) -> str:
    """The README."""
    columns = takes_single_columns(report)
    shorts = [f"`{_cell(one.name)}`" for one in report.outputs]
    shown = [
        f"| `{_cell(one.name)}` | {one.dtype} | ({', '.join(map(str, one.shape))}) |"
        for one in report.inputs
    ]
    said = (
        "Every column is an input of its own, one value for each row. A missing number is NaN; a "
        "text that the training data does not have counts as missing."
        if columns
        else "The inputs are arrays, rows first. `model.onnx` says in its metadata (`inputs`) how "
        "they are made."
    )
    meaning = (
        f"{shorts[0]} has one logit for each class, {shorts[1]} the class of the largest one, "
        f"{shorts[2]} its share."
        if schema.classes and len(shorts) == 3
        else f"{shorts[0]} is in the unit of `{_cell(schema.target)}`."
    )
    parts = [
        f"# A model for `{_cell(schema.target)}`, as {report.kind}",
        f"Made by trainwright from the run {report.run}. `report.html` compares it with the trained"
        f" model: {report.metric} {report.metrics.exported:.4g}, trained "
        f"{report.metrics.trained:.4g}, on {report.rows:,} validation rows. {_likeness(report)} "
        "`manifest.json` has the SHA-256 of every file.",
        f"{said} The outputs are {', '.join(shorts)}. {meaning} Any number of rows is allowed.",
        "\n".join(["| input | type | shape |", "|---|---|---|", *shown]),
        "The programs need `pip install onnxruntime numpy`, and run in this folder.",
        "`example.npz` holds up to three rows of the validation data, and the outputs that this "
        "model gave for them when it was exported." + _EXAMPLE_TABLE * columns,
        _IN_MEMORY.strip(),
        _FROM_FILE.strip()
        .replace("$what", _TABLE_SAID if columns else _ARRAYS_SAID)
        .replace("$rows", _TABLE_FILE if columns else _ARRAY_FILE),
        _SERVER.strip(),
        "A request is a JSON object with one list of values for each input.",
    ]
    return "\n\n".join(parts) + "\n"


def _likeness(report: ExportReport) -> str:
    """A sentence on how alike exported and trained model decide."""
    if report.differences is None:
        return f"{100 * report.agreement:.4g} % of these rows get the trained model's class."
    off = report.differences
    return (
        f"Its numbers differ from the trained model's by {100 * off.median:.2g} % of the target's "
        f"standard deviation for the median row, by {100 * off.largest:.2g} % for the worst one."
    )


def _cell(text: str) -> str:
    """A name on one line of Markdown, in a table or in a code span."""
    return " ".join(text.replace("`", "'").replace("|", "/").split())
