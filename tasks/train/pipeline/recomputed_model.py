"""A whole model in whose passes runs of modules are recomputed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.memory.recompute_names import ends_of
from trainwright.estimator.trace.cuts.forward_graph import SampleCount, tensors_in
from trainwright.tasks.errors import BadInput
from trainwright.tasks.train.passes.recomputed import Recomputed, recompute
from trainwright.tasks.train.pipeline.stage_model import StageModel

if TYPE_CHECKING:
    from trainwright.estimator.trace.cuts.model_cuts import CutModel


def recompute_in(
    model: torch.nn.Module, names: Sequence[str], cut_model: Callable[[], CutModel]
) -> list[Recomputed | RecomputedModel]:
    """Do what has these names again in the model's backward passes, by `memory.recompute_names`.

    `cut_model` is called if several modules are recomputed together. Raises BadInput if the model
    has no such modules.
    """
    alone = [one for one in names if len(set(ends_of(one))) == 1]
    if alone == list(names):
        return [*recompute(model, names)]
    # A module inside one that the model's code calls as a whole is recomputed by itself.
    cut = cut_model()
    inside = [one for one in alone if cut.is_inside_call(one)]
    again = RecomputedModel(model, cut, [one for one in names if one not in inside])
    return [again, *recompute(model, inside)]


class RecomputedModel:
    """Replaces a model's `forward`: it makes the same calls, some of them again when needed.

    Only in training; else the model's own `forward` runs.
    """

    def __init__(self, model: torch.nn.Module, cut: CutModel, names: Sequence[str]) -> None:
        """Raises BadInput if the model's calls are not known, or it has no such modules."""
        if cut.not_cut:
            raise BadInput(
                f"layout.pipelines: recompute: got {', '.join(names)}; allowed: single modules, "
                f"since the calls of the model are not known: {cut.not_cut}"
            )
        self._model, self._forward = model, model.forward
        self._stage = StageModel(model, cut, 0, len(cut.units), names)
        model.forward = self

    def release(self) -> None:
        """Give the model its `forward` again."""
        del self._model.forward

    def __call__(self, inputs: Any) -> Any:
        if not (torch.is_grad_enabled() and self._model.training):
            return self._forward(inputs)
        return self._stage(inputs, self._samples(inputs))

    def _samples(self, inputs: Any) -> int:
        tensors = tensors_in(inputs)
        for tensor, facts in zip(tensors, self._stage.receives, strict=False):
            for size, planned in zip(tensor.shape, facts.shape or (), strict=False):
                if isinstance(planned, SampleCount):
                    return (size - planned.fixed) // planned.per_sample
        return len(tensors[0])
