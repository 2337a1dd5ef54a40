"""BatchNorm over the joint batch of unequal ranks, on CPU and GPU.

Forward: one sum of [Σx, Σx², n] over ranks gives mean and variance of the joint batch. Backward: one sum of [Σg, Σg·x̂] gives
dx = γ/σ · (g − Σg/n − x̂ · Σ(g·x̂)/n). Sums are carried in float64, so that E[x²] − E[x]² loses nothing in float32.
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: TID253 - only ranks import this
from torch import nn  # noqa: TID253

from trainwright.tasks.train.collective import Collective, sum_

Kind = nn.modules.batchnorm._BatchNorm


class JointBatchNorm(nn.Module):
    """Takes the place of a BatchNorm while training, with its parameters and running statistics.

    `weight_of_batch` is 0 for a rank whose samples do not count (it takes part in the sums, and adds nothing).
    """

    def __init__(self, inner: Kind, collective: Collective, name: str) -> None:
        super().__init__()
        self.inner = inner
        self.collective = collective
        self.name = name
        self.weight_of_batch = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inner = self.inner
        if not self.training:
            result: torch.Tensor = inner(inputs)
            return result
        axes = [0, *range(2, inputs.dim())]
        wide = inputs.detach().to(torch.float64)
        count = inputs.numel() / inputs.shape[1] * self.weight_of_batch
        sums = torch.cat(
            [
                wide.sum(axes) * self.weight_of_batch,
                (wide * wide).sum(axes) * self.weight_of_batch,
                torch.tensor([count], dtype=torch.float64, device=inputs.device),
            ]
        )
        sum_(self.collective, sums, f"{self.name}.forward")
        channels = inputs.shape[1]
        total = sums[-1]
        mean = sums[:channels] / total
        variance = (sums[channels : 2 * channels] / total - mean * mean).clamp_min(0)
        if inner.track_running_stats and inner.running_mean is not None and inner.running_var is not None:
            if inner.num_batches_tracked is not None:
                inner.num_batches_tracked.add_(1)
            momentum = inner.momentum if inner.momentum is not None else 1.0 / float(inner.num_batches_tracked or 1)
            unbiased = variance * total / (total - 1).clamp_min(1)
            inner.running_mean.lerp_(mean.to(inner.running_mean.dtype), momentum)
            inner.running_var.lerp_(unbiased.to(inner.running_var.dtype), momentum)
        scale = torch.rsqrt(variance + inner.eps)
        normal = _Normalise.apply(inputs, mean, scale, total, self)
        if inner.weight is None:
            return normal  # type: ignore[no-any-return]
        shape = [1, channels] + [1] * (inputs.dim() - 2)
        return normal * inner.weight.view(shape) + inner.bias.view(shape)  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    """x̂ = (x − mean) · scale, whose gradient takes into account that mean and scale depend on every rank's x."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        total: torch.Tensor,
        owner: JointBatchNorm,
    ) -> torch.Tensor:
        shape = [1, inputs.shape[1]] + [1] * (inputs.dim() - 2)
        normal = ((inputs.to(torch.float64) - mean.view(shape)) * scale.view(shape)).to(inputs.dtype)
        ctx.save_for_backward(inputs, mean, scale, total)
        ctx.owner = owner
        return normal

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, mean, scale, total = ctx.saved_tensors
        gradient = gradients[0]
        axes = [0, *range(2, inputs.dim())]
        shape = [1, inputs.shape[1]] + [1] * (inputs.dim() - 2)
        normal = (inputs.to(torch.float64) - mean.view(shape)) * scale.view(shape)
        wide = gradient.to(torch.float64)
        owner = ctx.owner
        sums = torch.cat([wide.sum(axes), (wide * normal).sum(axes)]) * owner.weight_of_batch
        sum_(owner.collective, sums, f"{owner.name}.backward")
        channels = inputs.shape[1]
        about_mean = (sums[:channels] / total).view(shape)
        about_scale = (sums[channels:] / total).view(shape)
        result = scale.view(shape) * (wide - about_mean - normal * about_scale)
        return result.to(inputs.dtype), None, None, None, None


def join_batch_norms(model: nn.Module, collective: Collective) -> list[JointBatchNorm]:
    """Replace every BatchNorm of a model by one over the joint batch; the replacements, in the model's order.

    Parameters and buffers stay the same objects in the same order; their names get an `inner` in between.
    """
    joined = []
    for name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            if isinstance(child, Kind) and not isinstance(parent, JointBatchNorm):
                joint = JointBatchNorm(child, collective, f"batch_norm.{name}.{child_name}")
                joint.train(child.training)
                setattr(parent, child_name, joint)
                joined.append(joint)
    return joined
