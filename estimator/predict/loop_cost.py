"""The training loop's time per step, in addition to the model's own step.

Arithmetic; loads no torch.

The loop gathers rows, copies gradients for the sum and records the step:

    t = step + tensor · P + gradient_byte · G + input_byte · I(b) + norm · N + norm_byte · V(b)

P is the number of trained parameters (tensors) and G their bytes; I(b) are the bytes of a batch of
b samples; N is the number of batch normalisations, which training computes over all ranks, and V(b)
the bytes of their values. The time that ranks wait for one another is not included
(`communication`). A device's coefficients are measured on the training loop itself
(`trainwright.tasks.train.worker.measure_loop`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field

from trainwright.estimator.curves import Affine, DeviceCurve, Knots, line_through
from trainwright.estimator.frozen_model import FrozenModel
from trainwright.estimator.structure import Structure

_TENSORS_PER_LAYER = 2  # weight and bias; for a structure that does not count them
_BATCH_NORM = "aten.native_batch_norm"


class LoopWork(NamedTuple):
    """The quantities on which the loop's time depends, in the order of `LoopCost`'s fields."""

    steps: float
    tensors: float
    gradient_bytes: float
    input_bytes: float
    norms: float
    norm_bytes: float


class LoopCost(FrozenModel):
    """Seconds for each quantity of `LoopWork`, on a whole device."""

    step_s: float = Field(ge=0)
    tensor_s: float = Field(ge=0)
    gradient_byte_s: float = Field(ge=0)
    input_byte_s: float = Field(ge=0)
    norm_s: float = Field(ge=0)
    norm_byte_s: float = Field(ge=0)

    def __call__(self, work: LoopWork) -> float:
        """Seconds of one step."""
        parts = (
            self.step_s,
            self.tensor_s,
            self.gradient_byte_s,
            self.input_byte_s,
            self.norm_s,
            self.norm_byte_s,
        )
        return sum(seconds * amount for seconds, amount in zip(parts, work, strict=True))


def loop_work(structure: Structure, batch_size: int) -> LoopWork:
    """The loop's work for a structure's step with this batch size."""
    norms = [one for one in structure.trace if one.kind == _BATCH_NORM]
    tensors = structure.parameter_tensors
    if tensors is None:
        tensors = _TENSORS_PER_LAYER * sum(layer.parameters > 0 for layer in structure.layers)
    return LoopWork(
        steps=1.0,
        tensors=float(tensors),
        gradient_bytes=float(structure.parameter_bytes),
        input_bytes=structure.idle_bytes.per_sample * batch_size,
        norms=float(sum(one.count for one in norms)),
        # A normalisation's bytes are those that it reads, and as many that it writes.
        norm_bytes=sum(one.count * one.bytes(batch_size) for one in norms) / 2,
    )


def in_training(
    curve: DeviceCurve, structure: Structure, cost: LoopCost, after_sum_s: float = 0.0
) -> DeviceCurve:
    """The curve of a structure's step, plus the time of the training loop.

    On a share of a core the loop is slower in the same proportion as the step. It is one thread, so
    more cores do not help it. `after_sum_s` is what a sum adds to the next step
    (`communication.Link`). It is the same on a share of a core, which is not used up while the rank
    waits for the sum.
    """
    assert curve.time_knots is not None
    slower = max(1.0, 1 / curve.cores) if curve.cores is not None else 1.0
    none, one = (slower * cost(loop_work(structure, size)) + after_sum_s for size in (0, 1))
    added = Affine(fixed=none, per_sample=one - none)
    sizes = curve.time_knots.sizes
    times = [
        value + added(size) for size, value in zip(sizes, curve.time_knots.values, strict=True)
    ]
    return curve.model_copy(
        update={
            "loop_s": added,
            "time_knots": Knots(sizes=sizes, values=tuple(times)),
            "step_time_s": line_through(sizes, times),
        }
    )


def fit_loop(samples: Sequence[tuple[LoopWork, float]]) -> LoopCost:
    """The best fit to samples of (work, seconds in addition to the model's step).

    Minimises Σ (1 − predicted / seconds)² without negative parts. Raises ValueError for a time that
    is not above zero.
    """
    import numpy as np
    from scipy.optimize import nnls

    if not samples or min(seconds for _, seconds in samples) <= 0:
        raise ValueError(
            "loop: no samples, or one that takes no time; allowed: one or more, each above 0 s"
        )
    rows = np.array([list(work) for work, _ in samples]) / np.array(
        [[seconds] for _, seconds in samples]
    )
    scales = np.where(rows.max(axis=0) > 0, rows.max(axis=0), 1.0)
    found, _ = nnls(rows / scales, np.ones(len(samples)))
    return LoopCost(**dict(zip(LoopCost.model_fields, (found / scales).tolist(), strict=True)))
