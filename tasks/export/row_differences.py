"""How alike two models decide on the same rows.

    classes   agreement = share of rows with the same class of the largest logit
    numbers   difference of a row = max |exported - trained| / s   over its outputs
              agreement = share of rows whose difference is at most CLOSE
    both      error of a row = max |exported - trained| / max(largest |output| of the row, size)

s is the standard deviation of the targets, so that 1 is as far as a forecast of their mean is off.
size is the root mean square of the output over all rows. Equal values that are not finite, such as
the logit of a class that is ruled out, do not differ; a finite and another one differ infinitely.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    off = _distances(wanted, found.reshape(len(found), -1).astype(np.float64))
    rows = off.max(axis=1, initial=0.0) / _scale(wanted, targets)
    return {
        "agreement": float(np.mean(rows <= CLOSE)),
        "differences": {"median": float(np.median(rows)), "largest": float(rows.max(initial=0.0))},
    }


def output_sizes(outputs: Sequence[Array]) -> list[float]:
    """The root mean square of the finite values of each output, (rows, …); 0 if there is none."""
    return [
        float(np.sqrt(np.mean(np.square(one, dtype=np.float64), where=np.isfinite(one))))
        if np.isfinite(one).any()
        else 0.0
        for one in outputs
    ]


def row_errors(
    exact: Sequence[Array], found: Sequence[Array], sizes: Sequence[float] | None = None
) -> Array:
    """The error of each row, (rows,): the greatest over outputs, each (rows, …).

    `sizes`: by output, see the module; default: `output_sizes` of these rows.
    """
    errors = np.zeros(len(exact[0]))
    for one, other, size in zip(exact, found, sizes or output_sizes(exact), strict=True):
        wanted = one.reshape(len(one), -1).astype(np.float64)
        off = _distances(wanted, other.reshape(len(other), -1).astype(np.float64))
        largest = np.abs(np.where(np.isfinite(wanted), wanted, 0.0)).max(axis=1, initial=size)
        errors = np.maximum(errors, off.max(axis=1, initial=0.0) / np.maximum(largest, 1e-30))
    return errors


def _distances(exact: Array, found: Array) -> Array:
    """|exact - found|: 0 for equal values that are not finite, infinite if one of two is not."""
    with np.errstate(invalid="ignore"):
        off = np.abs(exact - found)
    same = (exact == found) | (np.isnan(exact) & np.isnan(found))
    return np.asarray(np.where(same, 0.0, np.where(np.isfinite(off), off, np.inf)))


def _scale(exact: Array, targets: Array) -> float:
    """The standard deviation of targets that are numbers, else of the outputs."""
    for values in (targets, exact):
        if np.issubdtype(values.dtype, np.floating):
            known = values[np.isfinite(values)]
            spread = float(np.std(known, dtype=np.float64)) if known.size else 0.0
            if spread > 0:
                return spread
    return 1.0
