"""Real rows, on which `loss_check` checks a source's loss. Runs the user's code."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch  # noqa: TID253 - this is a separate process

from trainwright.estimator.precision import PARAMETER_DTYPES
from trainwright.estimator.trace.checked_rows import MOST_ROWS, RealRows
from trainwright.estimator.trace.training_step import TrainingStepSpec

_log = logging.getLogger(__name__)
_READ_S, _LEAST_READ = 1.0, 4


def real_rows(what: TrainingStepSpec, asked: Mapping[str, Any] | None) -> RealRows | None:
    """Rows for the check: given targets, of the source's dataset, or of `example_batch`.

    `asked`: `rows`, or `uri` of what the source's `dataset` reads; None: no check is wanted.
    Returns None if there are none, or the source has no loss of its own.
    """
    definition = what.definition
    if definition.loss is None or asked is None:
        return None
    if "rows" in asked:
        rows = torch.tensor(asked["rows"])
        return RealRows(
            rows.to(PARAMETER_DTYPES[what.precision]) if rows.is_floating_point() else rows
        )
    # Data or code that fails is told where it is read to train.
    try:
        if "uri" in asked and definition.dataset is not None:
            part = definition.dataset(asked["uri"], "train", **what.config)
            collate = definition.collate or torch.utils.data.default_collate
            inputs, targets = collate(_spaced_samples(part))
            if isinstance(inputs, dict) and len(inputs) == 1:  # a model gets a single one as it is
                [inputs] = inputs.values()
            return RealRows(targets, inputs)
        if definition.example_batch is not None:
            inputs, targets = definition.example_batch(MOST_ROWS)
            return RealRows(targets, inputs)
    except Exception:  # noqa: BLE001 - the user's code
        _log.info("no rows to check the loss on", exc_info=True)
    return None


def _spaced_samples(part: Any) -> list[Any]:
    """Evenly spaced samples, as many as can be read in `_READ_S`."""
    until, found = time.monotonic() + _READ_S, list[Any]()
    for place in torch.linspace(0, len(part) - 1, min(MOST_ROWS, len(part))).round().tolist():
        found.append(part[int(place)])
        if time.monotonic() > until and len(found) >= _LEAST_READ:
            break
    return found
