"""The loss of a batch, and the weight by which it counts among other parts of the joint batch.

A mean loss of part p is s_p / w_p: the sum over what it counts (samples, tokens, weights of
classes), divided by how much that is. The joint loss of all parts is Σ s_p / Σ w_p, whatever ranks
and micro-batches the parts are on. For a mean over samples, w_p is their number.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch  # noqa: TID253 - only code that runs models imports this
from torch.utils._pytree import tree_map_only  # noqa: TID253

from trainwright.estimator.errors import BadInput
from trainwright.estimator.trace.source import ModelDefinition

IGNORED = -100
"""The target that torch's cross-entropy leaves out."""
_ALLOWED = "allowed: a scalar tensor, the mean over the batch, or a pair (sum, weight)"


class BatchLoss:
    """A loss function of outputs and targets; called, it gives a batch's mean."""

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        weight_of: Callable[[Any], Any] | None = None,
        *,
        own: bool = False,
    ) -> None:
        """`weight_of`: from targets to w_p, None: samples. `own`: it is the source's."""
        self._function, self._weight_of, self._own = function, weight_of, own

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The mean, a scalar with a gradient. Raises BadInput if the loss is none."""
        given = self._function(outputs, targets)
        if not isinstance(given, tuple | list):
            return _scalar(given)
        total, weight = self._pair(given)
        mean: torch.Tensor = total / weight
        return mean

    def weighted(self, outputs: Any, targets: Any, samples: int) -> tuple[torch.Tensor, float]:
        """The mean s_p / w_p, and w_p.

        Of no `samples`, one stands for them, without a weight. A mean without a weight may be NaN;
        its gradient is zero. Raises BadInput if a weight is negative or not finite.
        """
        gate = _Gate() if torch.is_grad_enabled() and (self._own or not samples) else None
        given = self._function(outputs if gate is None else gate.before(outputs), targets)
        weight: Any = float(samples)
        if isinstance(given, tuple | list):
            given, weight = self._pair(given)
            given = given / weight
        elif self._weight_of is not None:
            weight = self._weight_of(targets)
        weight = _number(weight) if samples else 0.0
        if gate is not None:
            gate.is_open = weight > 0
        return given, weight

    def _pair(self, given: Sequence[Any]) -> tuple[torch.Tensor, Any]:
        if self._weight_of is not None:
            raise BadInput(
                "loss: returned a pair, and the model's source has loss_weight too; allowed: a "
                "pair (sum, weight), or a mean and loss_weight(targets)"
            )
        if len(given) != 2:
            raise BadInput(f"loss: returned {len(given)} values; {_ALLOWED}")
        total, weight = given
        if isinstance(weight, torch.Tensor):
            weight = weight.detach()
        return _scalar(total), weight


def _scalar(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise BadInput(f"loss: returned {given}; {_ALLOWED}")
    return value


def _number(weight: Any) -> float:
    one = isinstance(weight, int | float) or (
        isinstance(weight, torch.Tensor) and weight.numel() == 1
    )
    number = float(weight) if one else math.nan
    if not 0 <= number < math.inf:
        many = f"a tensor of {weight.numel()}" if isinstance(weight, torch.Tensor) else None
        given = f"{number:g}" if one else many or type(weight).__name__
        raise BadInput(f"loss: its weight is {given}; allowed: a finite number of at least 0")
    return number


class _Gate:
    """Lets the gradient of a loss through to the model's outputs, or zeros in its place.

    A mean over nothing is 0 / 0, whose gradient is NaN, also if it is multiplied by 0.
    """

    is_open = True

    def before(self, outputs: Any) -> Any:
        """The same outputs, behind the gate."""

        def gated(one: torch.Tensor) -> Any:
            return _Gated.apply(one, self)  # type: ignore[no-untyped-call]

        return tree_map_only(torch.Tensor, gated, outputs)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gate: _Gate) -> torch.Tensor:
        ctx.gate = gate
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0]
        return gradient if ctx.gate.is_open else torch.zeros_like(gradient), None


def loss_function(
    definition: ModelDefinition, task: str, label_smoothing: float = 0.0
) -> BatchLoss:
    """The source's loss, or the task's: cross-entropy for classes, squared error for numbers.

    With the job's `label_smoothing` it is the loss of training, without it that of validation.
    Raises BadInput for a smoothing if the task has no classes, or if the source's own loss has no
    parameter of that name; and for a `loss_weight` without a loss.
    """
    own = definition.loss
    if label_smoothing and not task.endswith("classification"):
        raise BadInput(
            f"train.label_smoothing: got {label_smoothing:g}; allowed: 0, as {task} has no classes"
        )
    if label_smoothing and own is not None and not _smooths(own):
        raise BadInput(
            f"train.label_smoothing: got {label_smoothing:g}; allowed: 0, as the loss of the "
            "model's source has no parameter label_smoothing"
        )
    if own is None and definition.loss_weight is not None:
        raise BadInput(
            "model.source: defines loss_weight(targets), but no loss(outputs, targets) that is "
            "divided by it"
        )
    if own is not None or task.endswith("classification"):
        plain: Callable[..., Any] = torch.nn.functional.cross_entropy if own is None else own
        if label_smoothing:
            plain = functools.partial(plain, label_smoothing=label_smoothing)
        weight_of = _counted if own is None else definition.loss_weight
        return BatchLoss(plain, weight_of, own=own is not None)
    if task in ("tabular-regression", "forecasting"):
        return BatchLoss(
            lambda outputs, targets: torch.nn.functional.mse_loss(
                outputs.reshape(targets.shape), targets
            )
        )
    raise BadInput(
        "model.source: a custom task needs a function loss(outputs, targets) in the model's source"
    )


def _counted(targets: torch.Tensor) -> float:
    """What cross-entropy is the mean over, in samples: targets that are not IGNORED."""
    if targets.is_floating_point() or not targets.numel():  # shares of classes
        return float(len(targets))
    return float((targets != IGNORED).sum()) * len(targets) / targets.numel()


def _smooths(loss: Callable[..., Any]) -> bool:
    """Whether a loss has a parameter `label_smoothing`."""
    try:
        return "label_smoothing" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False
