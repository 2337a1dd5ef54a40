"""What operations cost on machines that were measured for longer than a calibration lasts. Loads no torch.

The more different networks a calibration holds, the less it errs on others: in its own 90 s there is room for some 200 to 500.
Those of a reference are many more, on another machine; its file comes with the package (`measure_reference` made it). So a
calibration of a CPU can tell its costs by a reference's: what differs is a factor for each family of operations, and what its own
steps teach beyond that (`whole_steps`). Which reference, or none, is said by what predicts its own networks best, each left out
(`fitting`).
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

from trainwright.estimator.predict.calibration import Calibration, parse

FOLDER = Path(__file__).parent / "data"


@cache
def references() -> tuple[Calibration, ...]:
    """Those of CPUs: one thread, fp32; `processor` says whose."""
    return tuple(
        parse(gzip.decompress(file.read_bytes()), file.name)
        for file in sorted(FOLDER.glob("reference-*.json.gz"))
    )
