"""Model averaging: ranks use their own gradients for some steps, then average their parameters.

With weights w_r, what rank r's losses counted (samples, tokens) over what those of all did since
the average before,

    average            θ ← Σ_r w_r θ_r
    block momentum     Δ ← η Δ + ζ (Σ_r w_r θ_r − θ₀),  θ ← θ₀ + Δ
    outer Nesterov     v ← μ v + (θ₀ − Σ_r w_r θ_r),  θ ← θ₀ − α (μ v + θ₀ − Σ_r w_r θ_r)

where θ₀ are the parameters after the average before. Sources: K. Chen and Q. Huo, "Scalable
training of deep learning machines by incremental block training", ICASSP 2016 (BMUF); A. Douillard
et al., "DiLoCo", arXiv:2311.08105.

The optimizer's moments stay each rank's own. When the state of all is needed, for a checkpoint or a
new group of ranks, they are averaged too. Floating-point buffers that changed, such as the running
statistics of batch normalisation, are averaged with the parameters; counters become the mean,
rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.runs.artefacts.layout import Outer
from trainwright.tasks.train.exchange.collective import Collective

BLOCK_MOMENTUM, BLOCK_RATE = 0.5, 1.0
OUTER_MOMENTUM, OUTER_RATE = 0.9, 0.7
FAR, NEAR = 1.5, 1.0
"""Above and below which divergence ranks average more and less often."""
VELOCITY = "velocity"
"""The name of Δ or v in a checkpoint's optimizer."""
_PIECE = 1 << 24


class Averaging:
    """Averages some parameters, and buffers, over all ranks of a group."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        buffers: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        every: int,
        outer: Outer,
    ) -> None:
        self._optimizer, self._collective = optimizer, collective
        self._most, self._outer = every, outer
        wanted = {id(one) for one in parameters if one.requires_grad}
        everything = [one for group in optimizer.param_groups for one in group["params"]]
        self._trained = {number: one for number, one in enumerate(everything) if id(one) in wanted}
        """by number in the optimizer"""
        self._buffers = list(buffers)
        self.every = every
        """steps between averages: it follows the measured divergence, up to what the plan says"""
        self.divergence = 0.0
        """of the last average"""
        self.averages = 0
        """how many there were"""
        self.weight = 0.0
        """this rank's samples since the last average, or the weights of its losses"""
        self.steps = 0
        self.unfinished = 0
        """updates alone in a step that has not ended"""
        self._before = 0
        """averages before the last step ended, or the group formed"""
        self._joined = False
        """whether all ranks have had the same parameters and moments since the last step"""
        self.velocities: dict[str, torch.Tensor] = {}
        """Δ or v, by name: `velocity.3` is the optimizer's fourth parameter's"""
        self._share = 1 / max(1, collective.size)
        """w_r of the last average"""
        self._anchors: list[torch.Tensor] = []
        """θ₀, and the buffers after the average before"""

    def begin(self) -> None:
        """All ranks have the same state now."""
        self.weight, self.steps, self.unfinished = 0.0, 0, 0
        self._before, self._joined = self.averages, True
        self._anchors = [one.detach().clone() for one in self._state()]
        self._share = 1 / self._collective.size

    def continue_from(self, before: Averaging) -> None:
        """Take over the interval and the outer step's state from averages of another layout."""
        self.load(before.document())
        own = {f"{VELOCITY}.{number}" for number in self._trained}
        self.velocities = {name: one for name, one in before.velocities.items() if name in own}

    def begin_anew(self) -> None:
        """The training starts from its initial state."""
        self.every, self.divergence, self.averages = self._most, 0.0, 0
        self.velocities = {}

    def _state(self) -> list[torch.Tensor]:
        return [*self._trained.values(), *self._buffers]

    def document(self) -> dict[str, Any]:
        """JSON for a checkpoint, which is written right after an average."""
        return {"every": self.every, "divergence": self.divergence, "averages": self.averages}

    def load(self, document: dict[str, Any]) -> None:
        """Restore a `document`; the interval stays within this plan's."""
        self.every = min(self._most, document["every"])
        self.divergence, self.averages = document["divergence"], document["averages"]

    def trained_alone(self, weight: float) -> None:
        """This rank has updated its parameters alone, by losses of this weight, within a step."""
        self.weight += weight
        self.unfinished += 1
        self._joined = False

    def step_done(self, weight: float = 0.0) -> None:
        """A step has ended; `weight` of this rank beside that of `trained_alone`."""
        self.weight += weight
        self.steps += 1
        self.unfinished, self._before, self._joined = 0, self.averages, False

    @property
    def since_step(self) -> int:
        """Averages since the last step ended, or since the group formed."""
        return self.averages - self._before

    @property
    def due(self) -> bool:
        """Whether it is time for an average."""
        return self.steps >= self.every

    def average(self, *, moments: bool = False, holds: bool = True) -> bool:
        """Average over all ranks, which call it at once; with `moments`, the optimizer's too.

        A rank without the state of this training (`holds`) adds nothing. Nothing changes before
        the last sum is complete. Returns False if all ranks are equal: then nothing changes at all.
        """
        if not self._anchors:
            self.begin()
        size, rank = self._collective.size, self._collective.rank
        given = torch.zeros(4, size, dtype=torch.float64)
        if holds:
            own = [self.weight, self._share, 1, not self._joined]
            given[:, rank] = torch.tensor(own, dtype=torch.float64)
        given = self._collective.sum_(given, "averaged samples")
        total, holders = float(given[0].sum()), float(given[2].sum())
        # Without any weight: as in the last average, in which ranks that are gone had a share too.
        weights = given[0] if total else given[1] if given[1].sum() else given[2]
        apart = bool(total or given[3].sum())
        if apart:
            self._share = float(weights[rank] / weights.sum())
            if moments:
                self._average_moments()
                self._joined = True
            if total:
                self._average_state(holds, holders)
        self.averages += 1
        self.weight, self.steps, self.unfinished = 0.0, 0, 0
        return apart

    def _average_state(self, holds: bool, holders: float) -> None:
        changed = torch.tensor(
            [
                float(not torch.equal(one, before))
                for one, before in zip(
                    self._buffers, self._anchors[len(self._trained) :], strict=True
                )
            ],
            dtype=torch.float64,
        )
        if len(changed):
            changed = self._collective.sum_(changed, "changed buffers")
        buffers = [one for one, count in zip(self._buffers, changed, strict=True) if count]
        means = self._sums([*self._trained.values(), *buffers], "average")
        self._follow_divergence(means, holds, holders)
        with torch.no_grad():
            for place, (number, one) in enumerate(self._trained.items()):
                one.copy_(means[place])
                self._step_outside(number, one, self._anchors[place])
            for one, mean in zip(buffers, means[len(self._trained) :], strict=True):
                one.copy_(mean)
        self._anchors = [one.detach().clone() for one in self._state()]

    def _average_moments(self) -> None:
        """Average the optimizer's moments and counters, unless a rank has none yet."""
        moments = [value for one in self._trained.values() for value in self._moments(one)]
        counts = torch.zeros(self._collective.size, dtype=torch.float64)
        counts[self._collective.rank] = len(moments)
        if len(set(self._collective.sum_(counts, "count of moments").tolist())) == 1:
            with torch.no_grad():
                for one, mean in zip(moments, self._sums(moments, "moments"), strict=True):
                    one.copy_(mean)

    def _moments(self, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        return [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]

    def _sums(self, tensors: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Σ_r w_r x_r of each tensor, in host memory; summed in fp32 or fp64."""
        found: dict[int, torch.Tensor] = {}
        for kind in sorted({_kind(one) for one in tensors}):
            places = [place for place, one in enumerate(tensors) if _kind(one) == kind]
            some = [tensors[place] for place in places]
            exact = torch.float32 if kind == "fp32" else torch.float64
            flat = torch.cat([one.detach().reshape(-1).to("cpu", exact) for one in some])
            flat *= self._share
            for number, piece in enumerate(flat.split(_PIECE)):
                self._collective.sum_(piece, f"{name} {kind} {number}")
            if kind == "counters":
                flat.round_()
            for place, part in zip(places, flat.split([one.numel() for one in some]), strict=True):
                found[place] = part.view(tensors[place].shape)
        return [found[place] for place in range(len(tensors))]

    def _follow_divergence(
        self, means: Sequence[torch.Tensor], holds: bool, holders: float
    ) -> None:
        """Average more often if ranks go ways that cancel each other.

        The divergence is Σ_r w_r² |θ_r − θ₀|² / |Σ_r w_r (θ_r − θ₀)|²: 1 if the ranks' ways are
        independent, as with steps of noise; less if they go the same way, Σ_r w_r² at least.
        """
        apart, together = 0.0, 0.0
        for own, mean, before in zip(self._trained.values(), means, self._anchors, strict=False):
            start = before.detach().to("cpu", torch.float64)
            apart += float((own.detach().to("cpu", torch.float64) - start).square().sum())
            together += float((mean - start).square().sum())
        found = torch.tensor(
            [self._share**2 * apart, together / holders] if holds else [0.0, 0.0],
            dtype=torch.float64,
        )
        apart, together = self._collective.sum_(found, "divergence").tolist()
        self.divergence = apart / together if together > 0 else 0.0
        if self.divergence > FAR:
            self.every = max(1, self.every // 2)
        elif self.divergence < NEAR:
            self.every = min(self._most, self.every * 2)

    def _step_outside(
        self, number: int, parameter: torch.nn.Parameter, before: torch.Tensor
    ) -> None:
        """The outer step: from the parameters before to those that the average suggests."""
        if self._outer == "none":
            return
        velocity = self.velocities.setdefault(f"{VELOCITY}.{number}", torch.zeros_like(parameter))
        moved = parameter.detach() - before
        if self._outer == "block-momentum":
            velocity.mul_(BLOCK_MOMENTUM).add_(moved, alpha=BLOCK_RATE)
            parameter.copy_(before + velocity)
        else:
            velocity.mul_(OUTER_MOMENTUM).sub_(moved)
            parameter.copy_(before - OUTER_RATE * (OUTER_MOMENTUM * velocity - moved))


def _kind(tensor: torch.Tensor) -> str:
    """Which tensors are summed together: those of a type, and counters, which are whole numbers."""
    if not tensor.is_floating_point() or not tensor.dim():
        return "counters"
    return "fp64" if tensor.dtype == torch.float64 else "fp32"
