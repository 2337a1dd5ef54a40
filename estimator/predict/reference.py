"""Reference calibrations: of machines that were measured for much longer than usual.

The more networks a calibration has measured, the smaller its errors on others. In 90 s it measures
about 200 to 500. A reference has many more, from another machine. Its file is in the package;
`measure.measure_reference` made it. A CPU's calibration can scale a reference's costs by a factor
for each family of operations, and then learn from its own steps (`fit.whole_steps`). It uses the
reference, if any, that predicts its own networks best when they are left out (`fit.step_fit`).
Loads no torch.
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

from trainwright.estimator.predict.calibration import Calibration, parse

FOLDER = Path(__file__).parent / "data"


@cache
def references() -> tuple[Calibration, ...]:
    """The references of CPUs: one thread, fp32; `processor` names the CPU."""
    return tuple(
        parse(gzip.decompress(file.read_bytes()), file.name)
        for file in sorted(FOLDER.glob("reference-*.json.gz"))
    )
