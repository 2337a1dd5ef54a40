"""BatchNorm over the joint batch of ranks with unequal batches.

Forward: one sum of [Σx, Σx², n] over ranks gives mean and variance of the joint batch. Backward:
one sum of [Σg, Σg·x̂] gives dx = (g − Σg/n − x̂ · Σ(g·x̂)/n) / σ. The sums are in float64, so that
E[x²] − E[x]² keeps full float32 precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch  # noqa: TID253 - only ranks import this
from torch import nn  # noqa: TID253

from trainwright.estimator.precision import wide
from trainwright.tasks.train.exchange.collective import Collective
from trainwright.tasks.train.exchange.rank_group import RankGroup


class JointForward:
    """Replaces the `forward` of a BatchNorm module. Its parameters, buffers and names stay.

    `weight` is 0 while this rank has no samples: it then takes part in the sums but adds nothing.
    """

    def __init__(
        self, norm: nn.modules.batchnorm._BatchNorm, collective: Collective | RankGroup, name: str
    ) -> None:
        self.norm, self.collective, self.name = norm, collective, name
        self.alone = norm.forward
        self.weight = 1.0
        self._noted: list[torch.Tensor] | None = None
        """the sums of the forward passes since `note_sums`"""
        self._known: Iterator[torch.Tensor] | None = None
        """the sums of the forward passes that are done again"""

    def release(self) -> None:
        """Give the module its own `forward` back."""
        vars(self.norm).pop("forward")

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        if not norm.training:
            return self.alone(input)
        axes, channels = [0, *range(2, input.dim())], input.shape[1]
        wide = input.detach().to(torch.float64)
        count = torch.tensor([input.numel() // channels], dtype=torch.float64, device=input.device)
        sums = self._joint(torch.cat([wide.sum(axes), (wide * wide).sum(axes), count]))
        total = float(sums[-1])
        if total <= 1:  # one value has no variance: use the running statistics instead
            if (
                norm.running_mean is None
                or norm.running_var is None
                or not norm.num_batches_tracked
            ):
                raise ValueError(  # torch's own message
                    "Expected more than 1 value per channel when training, "
                    f"got input size {input.shape}"
                )
            return nn.functional.batch_norm(
                input,
                norm.running_mean,
                norm.running_var,
                norm.weight,
                norm.bias,
                training=False,
                eps=norm.eps,
            )
        mean = sums[:channels] / total
        variance = (sums[channels:-1] / total - mean * mean).clamp_min(0)
        self._track(mean, variance * (total / (total - 1)))
        scale = torch.rsqrt(variance + norm.eps)
        normal: torch.Tensor = _Normalise.apply(input, mean, scale, total, self)  # type: ignore[no-untyped-call]
        if norm.affine:
            shape = _beside_channels(input)
            normal = normal * norm.weight.view(shape) + norm.bias.view(shape)
        return normal.to(input.dtype)

    def note_sums(self) -> list[torch.Tensor]:
        """A list of the joint batch's sums in the forward passes from now on."""
        self._noted = []
        return self._noted

    def sums_again(self, known: Sequence[torch.Tensor] | None) -> None:
        """Forward passes are done again, with these sums; None: they are not any more."""
        self._noted = None
        self._known = None if known is None else iter(known)

    def _joint(self, own: torch.Tensor) -> torch.Tensor:
        """The sums over ranks of a forward pass; if it is done again, those it had."""
        if self._known is not None:
            return next(self._known)
        found = self.sum(own * self.weight, "forward")
        if self._noted is not None:
            self._noted.append(found)
        return found

    def sum(self, sums: torch.Tensor, direction: str) -> torch.Tensor:
        """Sum over ranks."""
        return self.collective.sum_(sums, f"{self.name}.{direction}")

    def _track(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        norm = self.norm
        if not norm.track_running_stats or norm.running_mean is None or norm.running_var is None:
            return
        momentum = norm.momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if momentum is None:  # in torch, this means a cumulative average
                momentum = 1.0 / float(norm.num_batches_tracked)
        for running, value in ((norm.running_mean, mean), (norm.running_var, unbiased_variance)):
            running.copy_(
                (1 - (momentum or 0.0)) * running + (momentum or 0.0) * value.to(running.dtype)
            )


class _Normalise(torch.autograd.Function):
    """x̂ = (x − mean) · scale, with mean and scale as functions of every rank's x."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        total: float,
        owner: JointForward,
    ) -> torch.Tensor:
        shape = _beside_channels(inputs)
        ctx.save_for_backward(inputs, mean, scale)
        ctx.total, ctx.owner, ctx.weight = total, owner, owner.weight
        return ((inputs.to(torch.float64) - mean.view(shape)) * scale.view(shape)).to(
            wide(inputs.dtype)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, mean, scale = ctx.saved_tensors
        axes, channels, shape = (
            [0, *range(2, inputs.dim())],
            inputs.shape[1],
            _beside_channels(inputs),
        )
        normal = (inputs.to(torch.float64) - mean.view(shape)) * scale.view(shape)
        gradient = gradients[0].to(torch.float64)
        sums = torch.cat([gradient.sum(axes), (gradient * normal).sum(axes)]) * ctx.weight
        means = ctx.owner.sum(sums, "backward") / ctx.total
        about_mean, about_scale = means[:channels].view(shape), means[channels:].view(shape)
        # With weight 0, the samples did not influence mean and scale and get no gradient.
        result = scale.view(shape) * (gradient - about_mean - normal * about_scale) * ctx.weight
        return result.to(inputs.dtype), None, None, None, None


def _beside_channels(inputs: torch.Tensor) -> list[int]:
    return [1, inputs.shape[1]] + [1] * (inputs.dim() - 2)


def join_batch_norms(model: nn.Module, collective: Collective) -> list[JointForward]:
    """Make every BatchNorm of a model use the joint batch in training mode."""
    return [
        joined_norm(module, collective, name)
        for name, module in model.named_modules()
        if is_batch_norm(module)
    ]


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalises by statistics of the batch."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def joined_norm(module: Any, collective: Collective | RankGroup, name: str) -> JointForward:
    """Make a BatchNorm use the joint batch in training mode."""
    forward = JointForward(module, collective, f"batch_norm.{name}")
    # On the instance, so that the module's class and names stay the same.
    module.forward = forward
    return forward
