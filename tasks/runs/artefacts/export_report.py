"""export/<kind>/report.json: what an export wrote, and how it compares with the trained model."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from trainwright.tasks.runs.artefacts.artefact import Artefact
from trainwright.tasks.runs.value import Value
from trainwright.tasks.spec.export_spec import ExportKind

EXPORT_FOLDER = "export/"
"""The folder of a run's exports, one folder for each kind."""
EXPORT_PAGE = "report.html"
"""The page in an export's folder."""
EXPORT_README = "README.md"
EXPORT_DRAWING = "circuit.svg"


class Exports(Artefact):
    """export/exports.json: which kinds the step `export` made, as the job asks."""

    FILE: ClassVar[str] = f"{EXPORT_FOLDER}exports.json"
    kinds: list[ExportKind] = Field(description="that were written")


class MetricPair(Value):
    """One metric on the run's validation rows."""

    trained: float = Field(description="of the trained model")
    exported: float = Field(description="of the exported one")


class RowDifferences(Value):
    """How far a model's numbers are off for a row, in standard deviations of the targets."""

    median: float = Field(description="of all rows")
    largest: float = Field(description="of all rows")


class SizePair(Value):
    """Sizes of two files, in bytes."""

    float: int = Field(description="of the float ONNX model")
    exported: int = Field(description="bytes of the exported model")


class CallTime(Value):
    """Seconds of one call, over interleaved rounds."""

    median: float = Field(description="seconds of a call")
    low: float = Field(description="5th percentile")
    high: float = Field(description="95th percentile")


class LatencyPair(Value):
    """Latencies of two models, measured in turn in one process with one thread."""

    batch_size: int = Field(description="rows of a call")
    rounds: int = Field(description="calls that were timed")
    float: CallTime = Field(description="of the float ONNX model; for `onnx`: of torch")
    exported: CallTime


class ExportInput(Value):
    """An input or output of an ONNX model. A dimension that may vary has a name."""

    name: str = Field(description="as the exported model has it")
    dtype: str = Field(description="type of its numbers")
    shape: list[int | str] = Field(description="of one row, or with the batch first")


class CircuitCells(Value):
    """What a circuit takes of one kind of FPGA, predicted and after synthesis."""

    family: str = Field(description="such as ice40 or ecp5")
    style: Literal["pipelined", "sequential"] = Field(description="pipelined, or sequential")
    device: str | None = Field(default=None, description="the FPGA it was placed on")
    predicted: int | None = Field(
        default=None, description="lookup tables with four inputs, before synthesis"
    )
    lookup_tables: int | None = Field(
        default=None, description="after synthesis, those of adders included"
    )
    cells: dict[str, int] = Field(description="cells by kind, such as LUT4")
    fmax_mhz: float | None = Field(default=None, description="clock after routing")
    latency_cycles: int | None = Field(default=None, description="clocks of one inference")
    energy_j: float | None = Field(default=None, description="of one inference, estimated")
    note: str | None = Field(default=None, description="why there is no clock")

    @property
    def named(self) -> str:
        """As in `pipelined circuit on iCE40 UP5K`."""
        return f"{self.style} circuit on {self.device or self.family}"


class ExportReport(Artefact):
    """report.json of an export."""

    FILE: ClassVar[str] = "report.json"
    kind: ExportKind = Field(description="the form: onnx, onnx-int8 or rtl")
    run: str = Field(description="URI of the run whose model it is")
    data_sha256: str = Field(description="fingerprint of the data")
    files: list[str] = Field(description="in the export's folder")
    metric: str = Field(description="the metric by which the exported model is judged")
    metrics: MetricPair
    agreement: float = Field(
        description="share of validation rows with the same decision: the same class, or numbers "
        "that differ by at most 1 % of the targets' standard deviation"
    )
    differences: RowDifferences | None = Field(
        default=None, description="of numbers: from the trained model's, by row"
    )
    max_error: float = Field(
        description="greatest difference of an output from the trained model's, relative to the "
        "row's largest output, or to the root mean square of all outputs if that is larger"
    )
    rows: int = Field(description="validation rows that were compared")
    tolerance: float | None = Field(
        default=None, description="how much worse the metric may be: see the job's `export`"
    )
    inputs: list[ExportInput] = Field(default_factory=list)
    outputs: list[ExportInput] = Field(default_factory=list)
    operations: dict[str, int] = Field(
        default_factory=dict, description="of the model itself, by kind, most frequent first"
    )
    opset: int | None = Field(default=None, description="ONNX: version of the operators")
    size_bytes: SizePair | None = None
    latency_s: LatencyPair | None = None
    kept_float: list[str] = Field(
        default_factory=list,
        description="onnx-int8: layers that are not quantised, as module/operation",
    )
    fine_tuned: bool = Field(
        default=False, description="onnx-int8: whether the model was trained again"
    )
    notes: list[str] = Field(
        default_factory=list, description="what a user should know, a sentence each"
    )
    vectors: int | None = Field(default=None, description="rtl: simulated input vectors")
    mismatches: int | None = Field(
        default=None, description="rtl: outputs that differ from the integer model"
    )
    cells: list[CircuitCells] = Field(
        default_factory=list, description="rtl: by circuit and FPGA family"
    )
    fmax_mhz: dict[str, float] = Field(
        default_factory=dict,
        description="rtl: of the pipelined circuit, or the sequential one if there is no other, by "
        "FPGA family",
    )
    latency_cycles: dict[str, int] = Field(default_factory=dict, description="rtl: by style")
    energy_j: float | None = Field(
        default=None,
        description="rtl: of one inference by the circuit that takes least, estimated",
    )
    energy_source: str | None = Field(
        default=None, description="where the energy of an inference comes from"
    )
    phases_s: dict[str, float] = Field(
        default_factory=dict, description="rtl: seconds of each part of the work"
    )
    tools: dict[str, str] = Field(default_factory=dict, description="versions by name")

    def least_energy(self) -> CircuitCells | None:
        """The circuit that takes `energy_j`; None if no circuit's energy is known."""
        known = [one for one in self.cells if one.energy_j is not None]
        return min(known, key=lambda one: one.energy_j or 0.0, default=None)
