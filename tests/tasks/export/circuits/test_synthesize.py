"""What yosys and nextpnr are doing is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainwright.tasks import progress
from trainwright.tasks.errors import TrainwrightError
from trainwright.tasks.export.circuits.synthesize import synthesise


def test_a_tool_that_fails_is_reported_when_it_begins_and_when_it_ends(tmp_path: Path) -> None:
    (tmp_path / "sequential.v").write_text("not Verilog")
    events: list[dict[str, Any]] = []
    with progress.listening(events.append), pytest.raises(TrainwrightError, match=r"sequential\.v"):
        synthesise(
            "ice40", 10, ["sequential.v", "sequential_harness.v"], "sequential", tmp_path, 120
        )
    begins, ends = events
    assert begins["doing"] == ends["doing"] == "yosys, sequential circuit, iCE40 UP5K"
    assert "took_s" not in begins
    assert ends["took_s"] >= 0
