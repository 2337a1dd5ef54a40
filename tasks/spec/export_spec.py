"""The part `export` of a job: in which forms a finished model is written."""

from __future__ import annotations

from typing import Literal

ExportKind = Literal["onnx", "onnx-int8", "rtl"]
