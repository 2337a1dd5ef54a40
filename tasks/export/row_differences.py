"""How alike two models decide on the same rows.

    classes   agreement = share of rows with the same class of the largest logit
    numbers   difference of a row = max |exported - trained| / s   over its outputs
              agreement = share of rows whose difference is at most CLOSE

s is the standard deviation of the targets, so that 1 is as far as a forecast of their mean is off.
"""

from __future__ import annotations

from typing import Any

import numpy as np  # noqa: TID253 - this runs in a separate process

Array = np.ndarray[Any, Any]
CLOSE = 0.01
"""A difference that does not count, in standard deviations of the targets."""


def compared(exact: Array, found: Array, targets: Array, classes: int) -> dict[str, Any]:
    """Fields `agreement` and, for numbers, `differences` of a report.

    `exact`, `found`: outputs of the trained and of the exported model, (rows, …). `classes`: their
    number, 0 for numbers.
    """
    if classes:
        same = exact[:, :classes].argmax(1) == found[:, :classes].argmax(1)
        return {"agreement": float(np.mean(same))}
    wanted = exact.reshape(len(exact), -1).astype(np.float64)
    off = np.abs(found.reshape(len(found), -1).astype(np.float64) - wanted)
    off = np.where(np.isnan(wanted) & np.isnan(off), 0.0, off)
    rows = np.nan_to_num(off.max(axis=1, initial=0.0), nan=np.inf) / _scale(wanted, targets)
    return {
        "agreement": float(np.mean(rows <= CLOSE)),
        "differences": {"median": float(np.median(rows)), "largest": float(rows.max(initial=0.0))},
    }


def _scale(exact: Array, targets: Array) -> float:
    """The standard deviation of targets that are numbers, else of the outputs."""
    for values in (targets, exact):
        if np.issubdtype(values.dtype, np.floating):
            spread = float(np.nanstd(values, dtype=np.float64))
            if np.isfinite(spread) and spread > 0:
                return spread
    return 1.0
