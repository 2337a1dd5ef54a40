"""An emulated device: its rank sleeps until the time has passed that each action takes there.

With c_lp the seconds of layer l in phase p for each sample on a device of speed 1, an action on b
samples takes

    t = c_lp · b / speed        Σ_lp c_lp = EMULATED_SAMPLE_S

A product of the joint batch counts the samples of all ranks: the weight gradient of a layer with
sync `factors`; all phases of one with sync `rows`, times the share of rows that the rank holds.
What the layers' actions leave of EMULATED_SAMPLE_S · b / speed passes at the end of the step's
passes; so does all of it if the layers are not known. The optimizer's update takes no time.

The rank sleeps when the emulated time is ahead of its own time by `LEAST_SLEEP_S`, so its own work
and the inaccuracy of sleeping are part of the emulated time. Waiting for other ranks is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch  # noqa: TID253 - only ranks import this
from torch.utils._pytree import tree_leaves  # noqa: TID253

from trainwright.estimator.curves import LayerCost
from trainwright.estimator.devices import EMULATED_SAMPLE_S
from trainwright.estimator.memory.recompute_names import covered
from trainwright.tasks.runs.artefacts.layout import Sync
from trainwright.tasks.train.layouts.factors import PHASES, ProductPhase

LEAST_SLEEP_S = 1e-3
_JOINT: Mapping[Sync, tuple[ProductPhase, ...]] = {
    "sum": (),
    "average": (),
    "factors": ("weight_gradient",),
    "rows": PHASES,
}
"""The phases that compute for the joint batch."""


class EmulatedDevice:
    """The emulated time of one rank's steps.

    Each step calls `begin`, then `begin_part` for each micro-batch, `end_passes` and `settle`.
    Between `begin` and `end_passes`, hooks on the layers call `forward` and `backward`.
    """

    def __init__(
        self,
        speed: float,
        layers: Sequence[LayerCost],
        syncs: Mapping[str, Sync],
        own_s: Callable[[], float],
        sleep: Callable[[float], object] = time.sleep,
        recomputed: Sequence[str] = (),
    ) -> None:
        """`layers`: costs in proportion to each other; `syncs`: by layer, where it is not `sum`.

        `recomputed`: modules whose forward pass is done again, which takes its time again.

        `own_s` is a clock that stands still while the rank waits for others.
        """
        self._speed, self._own_s, self._sleep = speed, own_s, sleep
        costs = {(one.name, phase): getattr(one, phase)(1) for one in layers for phase in PHASES}
        total = sum(costs.values())
        scale = EMULATED_SAMPLE_S / speed / total if total > 0 else 0.0
        self._sample_s = {action: scale * cost for action, cost in costs.items()}
        self._layers = [one.name for one in layers]
        self.follow(syncs, recomputed)
        self.due_s = 0.0
        """emulated time of the step so far"""
        self._joint_due_s = 0.0
        self._began_s = 0.0
        self._samples = 0
        self.later: Collection[str] = ()
        """the layers whose weight gradients backward passes leave out"""
        self._done: set[tuple[str, ProductPhase, bool]] = set()
        self._active = False

    def follow(self, syncs: Mapping[str, Sync], recomputed: Sequence[str] = ()) -> None:
        """Work by a layout with these syncs and recomputed modules from the next step on."""
        self._joint = {(name, phase) for name, sync in syncs.items() for phase in _JOINT[sync]}
        self._joint_sample_s = sum(self._sample_s.get(action, 0.0) for action in self._joint)
        self._again = covered(recomputed, self._layers)
        self._again_sample_s = sum(self._sample_s[name, "forward"] for name in self._again)

    def watch(self, model: torch.nn.Module) -> None:
        """Register hooks on the model's layers."""
        known = set(self._layers)
        for name, module in model.named_modules():
            name = name or type(module).__name__
            if name in known:
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[Any, Any, Any], None]:
        def after(module: Any, _: Any, outputs: Any) -> None:
            if not self._active:
                return
            if torch._C._current_autograd_node() is None:
                self.forward(name)
            else:
                self.forward_again(name)
            for one in tree_leaves(outputs):
                if isinstance(one, torch.Tensor) and one.requires_grad:
                    # Runs before the layer's backward pass, so that gradients leave after it.
                    one.register_hook(lambda _: self.backward(name))

        return after

    def begin(self, spent_s: float) -> None:
        """A step begins, of whose emulated time some has passed."""
        self.due_s = self._joint_due_s = 0.0
        self._began_s, self._active = self._own_s() - spent_s, True

    def begin_part(self, samples: int) -> None:
        """The passes of a micro-batch begin."""
        self._samples = samples
        self._done.clear()

    def forward(self, layer: str) -> None:
        """A layer has run forward."""
        self._own(layer, "forward")

    def forward_again(self, layer: str) -> None:
        """A layer has run forward for the backward pass."""
        if layer in self._again:
            self._own(layer, "forward", again=True)

    def backward(self, layer: str) -> None:
        """A layer runs backward."""
        self._own(layer, "input_gradient")
        if layer not in self.later:
            self._own(layer, "weight_gradient")

    def later_weights(self, layers: Iterable[str]) -> None:
        """The weight gradients that backward passes left out are made."""
        for layer in layers:
            self._own(layer, "weight_gradient")

    def _own(self, layer: str, phase: ProductPhase, *, again: bool = False) -> None:
        """An action on the micro-batch of this rank; counted once, however often a layer runs."""
        action = layer, phase
        if self._active and action not in self._joint and (*action, again) not in self._done:
            self._done.add((*action, again))
            self.due_s += self._sample_s.get(action, 0.0) * self._samples
            self._catch_up(LEAST_SLEEP_S)

    def joint(self, layer: str, phase: ProductPhase, samples: float) -> None:
        """A product of the joint batch: as many samples, times the share of rows if it has some."""
        if self._active:
            seconds = self._sample_s.get((layer, phase), 0.0) * samples
            self.due_s += seconds
            self._joint_due_s += seconds
            self._catch_up(LEAST_SLEEP_S)

    def end_stage(self) -> None:
        """The rank has run all passes of a step of its stage."""
        self._catch_up(0.0)

    def end_passes(self, samples: float) -> None:
        """The rank has run all passes of the step, of so many samples in all."""
        sample_s = EMULATED_SAMPLE_S / self._speed + self._again_sample_s
        whole = (sample_s - self._joint_sample_s) * samples
        self.due_s = whole + self._joint_due_s
        self._catch_up(0.0)

    def settle(self) -> None:
        """The step ends, with the products that follow its passes."""
        self._catch_up(0.0)
        self._active = False

    def stop(self) -> None:
        """The step is abandoned."""
        self._active = False

    def _catch_up(self, least_s: float) -> None:
        ahead_s = self.due_s - (self._own_s() - self._began_s)
        if ahead_s > least_s:
            self._sleep(ahead_s)
