"""Store the model and seal the run."""

from __future__ import annotations

from trainwright.operators.base import StepOperator


class StoreOperator(StepOperator):
    """Put the model (safetensors, source, signature) into the run folder and seal all of it with a manifest of sha256 sums.

    The manifest is written once, last; then everything is read back and verified.
    """

    step = "store"
