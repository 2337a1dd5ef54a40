"""Model averaging: ranks train alone for some steps, then take the average of their parameters.

With weights w_r = b_r / B, samples of rank r over those of all,

    average            θ ← Σ_r w_r θ_r
    block momentum     Δ ← η Δ + ζ (Σ_r w_r θ_r − θ₀),  θ ← θ₀ + Δ
    outer Nesterov     v ← μ v + (θ₀ − Σ_r w_r θ_r),  θ ← θ₀ − α (μ v + θ₀ − Σ_r w_r θ_r)

where θ₀ are the parameters after the average before. Sources: K. Chen and Q. Huo, "Scalable
training of deep learning machines by incremental block training", ICASSP 2016 (BMUF); A. Douillard
et al., "DiLoCo", arXiv:2311.08105.

The optimizer's moments stay each rank's own, but for a checkpoint, which averages them too. Running
statistics of batch normalisation are averaged with the parameters.
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.runs.artefacts.layout import Outer
from trainwright.tasks.train.exchange.collective import Collective

BLOCK_MOMENTUM, BLOCK_RATE = 0.5, 1.0
OUTER_MOMENTUM, OUTER_RATE = 0.9, 0.7
FAR, NEAR = 0.5, 0.1
"""Above and below which divergence ranks average more and less often."""
VELOCITY = "velocity"
"""The name of Δ or v in a checkpoint's optimizer."""
_PIECE = 1 << 24


class Averaging:
    """Averages the state of all ranks of a group."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        every: int,
        outer: Outer,
    ) -> None:
        self._model, self._optimizer, self._collective = model, optimizer, collective
        self.every, self._most, self._outer = every, every, outer
        """steps between averages: it follows the measured divergence, up to what the plan says"""
        self.samples = 0
        """this rank's samples since the last average"""
        self.steps = 0
        self.velocities: dict[str, torch.Tensor] = {}
        """Δ or v, by name: `velocity.3` is the optimizer's fourth parameter's"""
        self._anchors: list[torch.Tensor] = []
        """θ₀"""

    def begin(self) -> None:
        """All ranks have the same state now."""
        self.samples = self.steps = 0
        self._anchors = [one.detach().clone() for one in self._trained()]

    def _trained(self) -> list[torch.nn.Parameter]:
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    def step_done(self, samples: int) -> bool:
        """A step of this rank's samples has ended. Returns whether an average is due."""
        self.samples += samples
        self.steps += 1
        return self.steps >= self.every

    def average(self, *, moments: bool = False) -> None:
        """Average over all ranks, which call it at once; with `moments`, the optimizer's too."""
        weight = self._weight()
        if moments:
            self._average_moments(weight)
        if not self.steps:
            return
        trained = self._trained()
        buffers = [one for one in self._model.buffers() if one.is_floating_point()]
        own = [one.detach().clone() for one in trained]
        self._sum([*trained, *buffers], weight)
        self._follow_divergence(trained, own, weight)
        with torch.no_grad():
            for number, parameter in enumerate(trained):
                self._step_outside(number, parameter)
        self.samples = self.steps = 0

    def _average_moments(self, weight: float) -> None:
        """Average the optimizer's moments, unless a rank has none yet."""
        moments = [value for one in self._trained() for value in self._moments(one)]
        counts = torch.zeros(self._collective.size, dtype=torch.float64)
        counts[self._collective.rank] = len(moments)
        if len(set(self._collective.sum_(counts, "moments").tolist())) == 1:
            self._sum(moments, weight)

    def _weight(self) -> float:
        """This rank's share of the samples since the last average."""
        given = torch.tensor([float(self.samples)], dtype=torch.float64)
        total = float(self._collective.sum_(given, "averaged samples"))
        return self.samples / total if total else 1 / self._collective.size

    def _moments(self, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        return [
            value
            for _, value in sorted(state.items())
            if isinstance(value, torch.Tensor) and value.dim()
        ]

    def _sum(self, tensors: list[torch.Tensor], weight: float) -> None:
        """Σ_r w_r x_r of each tensor, in place; summed in fp32 or fp64."""
        for dtype in sorted({one.dtype for one in tensors}, key=str):
            some = [one for one in tensors if one.dtype == dtype]
            exact = torch.float64 if dtype == torch.float64 else torch.float32
            flat = torch.cat([one.detach().reshape(-1).to("cpu", exact) for one in some])
            flat *= weight
            for number, piece in enumerate(flat.split(_PIECE)):
                self._collective.sum_(piece, f"average {dtype} {number}")
            parts = flat.split([one.numel() for one in some])
            with torch.no_grad():
                for one, part in zip(some, parts, strict=True):
                    one.copy_(part.view(one.shape))

    def _follow_divergence(
        self, averaged: list[torch.nn.Parameter], own: list[torch.Tensor], weight: float
    ) -> None:
        """Average more often if ranks are far apart, compared with how far they went together.

        Σ_r w_r |θ_r − θ|² / |θ − θ₀|².
        """
        apart = weight * sum(
            float((mine - one.detach()).double().square().sum())
            for mine, one in zip(own, averaged, strict=True)
        )
        together = sum(
            float((one.detach() - anchor).double().square().sum())
            for one, anchor in zip(averaged, self._anchors, strict=True)
        )
        found = torch.tensor([apart, together / self._collective.size], dtype=torch.float64)
        apart, together = self._collective.sum_(found, "divergence").tolist()
        divergence = apart / together if together > 0 else 0.0
        if divergence > FAR:
            self.every = max(1, self.every // 2)
        elif divergence < NEAR:
            self.every = min(self._most, self.every * 2)

    def _step_outside(self, number: int, parameter: torch.nn.Parameter) -> None:
        """The outer step: from the parameters before to those that the average suggests."""
        before = self._anchors[number]
        if self._outer != "none":
            name = f"{VELOCITY}.{number}"
            velocity = self.velocities.setdefault(name, torch.zeros_like(parameter))
            moved = parameter.detach() - before
            if self._outer == "block-momentum":
                velocity.mul_(BLOCK_MOMENTUM).add_(moved, alpha=BLOCK_RATE)
                parameter.copy_(before + velocity)
            else:
                velocity.mul_(OUTER_MOMENTUM).sub_(moved)
                parameter.copy_(before - OUTER_RATE * (OUTER_MOMENTUM * velocity - moved))
        self._anchors[number] = parameter.detach().clone()
