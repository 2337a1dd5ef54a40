"""Gradients of the joint batch from ranks with unequal batches.

With loss_r the mean over rank r's b_r samples, the mean over all B is Σ_r (b_r / B) · loss_r. So
each rank scales its loss by b_r / B before the backward pass, and the gradients are summed in fp32
or fp64. (Averaging the ranks' means instead would weight their samples wrongly.)

Gradients are sent in buckets. Each bucket is sent as soon as the backward pass has filled it,
while the pass continues. A model that fits into one bucket needs no hooks for that. The layout of
the buckets is fixed: with three or more ranks, the order of additions affects the last digit of a
sum, and a replay must reproduce it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.precision import wide
from trainwright.estimator.predict.communication import GRADIENT_BUCKET_BYTES
from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.exchange.collective import Collective


@dataclass
class _Bucket:
    """A flat buffer in host memory for the gradients of some parameters, and each one's part."""

    name: str
    flat: torch.Tensor
    parts: dict[int, torch.Tensor]
    missing: set[int] = field(default_factory=set)
    handle: Any = None


class GradientSum:
    """Sums the gradients of some parameters over all ranks.

    Each step calls `begin`, runs the backward passes, then calls `send_rest` and `finish`.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        collective: Collective,
        bucket_bytes: int = GRADIENT_BUCKET_BYTES,
    ) -> None:
        """`parameters` are in the order of the forward pass."""
        # The backward pass reaches the last parameters first.
        self._parameters = [one for one in parameters if one.requires_grad][::-1]
        self._collective = collective
        self._buckets = _buckets(self._parameters, bucket_bytes)
        self._sent = 0
        self.own_square = 0.0
        """|h|² of what this rank has sent in this step, h = (b_r / B) · g_r."""
        self.used = [0.0] * len(self._parameters)
        """1 for each parameter that had a gradient in this step, else 0."""
        self.overflowed = False
        """Whether this rank sent a gradient that is not finite."""
        self.loss_scale = 1.0
        """The factor on the loss besides b_r / B."""
        self._widened: dict[int, torch.Tensor] = {}
        """fp32 sums of half-precision gradients over micro-batches, by parameter"""
        self.last = True
        """Whether this is the step's last backward pass; earlier ones only accumulate."""
        for at, bucket in enumerate(self._buckets):
            for number in bucket.parts:
                short = wide(self._parameters[number].dtype) != self._parameters[number].dtype
                if short or len(self._buckets) > 1:
                    self._parameters[number].register_post_accumulate_grad_hook(
                        self._hook(at, number, short=short)
                    )

    def begin(self) -> None:
        """Start a step: drop the gradients of the previous one."""
        for bucket in self._buckets:
            bucket.handle = None
            bucket.missing.update(bucket.parts)
        for parameter in self._parameters:
            parameter.grad = None
        self._sent = 0
        self.own_square = 0.0
        self._widened.clear()
        self.overflowed = False

    def _hook(self, at: int, number: int, *, short: bool) -> Any:
        bucket = self._buckets[at]

        def arrived(_: torch.Tensor) -> None:
            if short:
                self._widen(number)
            if not self.last:
                return
            if self._sent > at:
                raise TrainingFailed(
                    "model: a parameter receives its gradient in several parts, which is not "
                    "supported; if the model uses torch.utils.checkpoint, pass use_reentrant=False"
                )
            bucket.missing.discard(number)
            if not bucket.missing:
                self._send(only_full=True)

        return arrived

    def _widen(self, number: int) -> None:
        """Accumulate a half-precision gradient in fp32: `grad` has too few digits for sums."""
        parameter, before = self._parameters[number], self._widened.get(number)
        if parameter.grad is not None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            self._widened[number] = (
                gradient.to(wide(parameter.dtype)) if before is None else before.add_(gradient)
            )
            parameter.grad = None

    def _fill(self, bucket: _Bucket) -> None:
        """Copy the gradients into their bucket, zeros for parameters that were not used."""
        parts, gradients = [], []
        for number, part in bucket.parts.items():
            gradient = self._widened.pop(number, self._parameters[number].grad)
            self.used[number] = float(gradient is not None)
            if gradient is None:
                part.zero_()
            else:
                parts.append(part)
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if parts:
            torch._foreach_copy_(parts, gradients)

    def _send(self, *, only_full: bool) -> None:
        """Send the next buckets, in order: all ranks must start the same sums in the same order."""
        while self._sent < len(self._buckets) and not (
            only_full and self._buckets[self._sent].missing
        ):
            bucket = self._buckets[self._sent]
            self._fill(bucket)
            if self.loss_scale != 1:
                bucket.flat.div_(self.loss_scale)
            # Before the sum, which overwrites the buffer.
            square = float(torch.dot(bucket.flat, bucket.flat))
            self.overflowed |= not math.isfinite(square) and not bool(bucket.flat.isfinite().all())
            self.own_square += square
            bucket.handle = self._collective.start_sum(bucket.flat, bucket.name)
            self._sent += 1

    def send_rest(self) -> None:
        """Send the remaining buckets after the backward pass."""
        self._send(only_full=False)

    def finish(self, used_anywhere: Sequence[float]) -> None:
        """Set every `grad` to the sum over ranks, or to None if no rank used the parameter.

        `used_anywhere` is the sum of `used` over ranks.
        """
        for bucket in self._buckets:
            self._collective.finish(bucket.handle)
            for number, part in bucket.parts.items():
                parameter = self._parameters[number]
                parameter.grad = (
                    part.to(parameter.device, parameter.dtype) if used_anywhere[number] else None
                )

    def joint_square(self) -> float:
        """|g|² of the summed gradient, after `finish`."""
        return sum(float(torch.dot(bucket.flat, bucket.flat)) for bucket in self._buckets)


def clip(
    parameters: Iterable[torch.nn.Parameter],
    bound: float,
    parts: Sequence[torch.nn.Parameter] = (),
    parts_square: float = 0.0,
) -> None:
    """Scale the parameters' gradients so that their norm is at most `bound`.

    Of `parts`, this rank holds only some rows; `parts_square` is the sum of squares over all ranks.
    The norm is computed in float64: ranks with different numbers of threads add in different
    orders, but must get the same result.
    """
    own = {id(one) for one in parts}
    gradients = [one.grad for one in parameters if one.grad is not None and id(one) not in own]
    norms = torch._foreach_norm(gradients, dtype=torch.float64) if gradients else []
    norm = (sum(float(value) ** 2 for value in norms) + parts_square) ** 0.5
    if norm > bound:
        gradients += [one.grad for one in parts if one.grad is not None]
        torch._foreach_mul_(gradients, bound / (norm + 1e-6))


def _buckets(parameters: list[torch.nn.Parameter], most_bytes: int) -> list[_Bucket]:
    groups: list[list[int]] = []
    size = 0
    for number, parameter in enumerate(parameters):
        dtype = wide(parameter.dtype)
        count = parameter.numel() * dtype.itemsize
        if (
            not groups
            or size + count > most_bytes
            or wide(parameters[groups[-1][0]].dtype) != dtype
        ):
            groups.append([])
            size = 0
        groups[-1].append(number)
        size += count
    buckets = []
    for at, group in enumerate(groups):
        counts = [parameters[number].numel() for number in group]
        flat = torch.zeros(sum(counts), dtype=wide(parameters[group[0]].dtype))
        parts = {
            number: part.view(parameters[number].shape)
            for number, part in zip(group, flat.split(counts), strict=True)
        }
        buckets.append(_Bucket(f"gradients.{at}", flat, parts))
    return buckets
