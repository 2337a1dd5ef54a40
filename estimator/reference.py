"""What operations cost on a machine that was measured for longer than a calibration lasts. Loads no torch.

The more different networks a calibration holds, the less it errs on others: in its own 90 s there is room for some 150. Those of
the reference are many more, on another machine, in the file that comes with the package (`measure_reference` made it). A
calibration of a CPU can therefore tell its costs by the reference's: what differs is a factor for each family of operations, and
what its own steps teach beyond that (`whole_steps`). Where that predicts its own networks, each left out, no better than what was
measured here alone, the reference is not used (`fitting`).
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

from trainwright.estimator.calibration import Calibration, parse

FILE = Path(__file__).parent / "data" / "reference-cpu.json.gz"


@cache
def reference() -> Calibration:
    """The reference of CPUs: one thread, fp32; `processor` says whose."""
    return parse(gzip.decompress(FILE.read_bytes()), FILE.name)
