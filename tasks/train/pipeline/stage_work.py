"""What a rank does in a step of a layout with stages: it holds and trains its units' parameters.

A tensor that a rank does not hold has no rows there, as a sharded layer of which it holds none.
Late-multiplied and sharded layers are so among the ranks that hold them, one of each pipeline:
factors of all micro-batches are gathered once in a step, rows are exchanged for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.exchange.rank_group import RankGroup
from trainwright.tasks.train.layouts.batch_norm import JointForward, is_batch_norm, joined_norm
from trainwright.tasks.train.layouts.cut_tensors import Cuts, CutTensors
from trainwright.tasks.train.layouts.late_multiply import LateMultiplied
from trainwright.tasks.train.layouts.layout_work import LayoutWork
from trainwright.tasks.train.layouts.sharded import Sharded
from trainwright.tasks.train.pipeline.deferred_weights import DeferredWeights
from trainwright.tasks.train.pipeline.stage_gradients import StageGradients
from trainwright.tasks.train.pipeline.stage_holders import (
    Holders,
    cuts_of_tensors,
    holders_of_tensors,
    stages_of,
)
from trainwright.tasks.train.pipeline.stage_model import StageModel
from trainwright.tasks.train.pipeline.stage_step import StagePlace, StageStep

if TYPE_CHECKING:
    from trainwright.estimator.trace.cuts.model_cuts import CutModel


class StageWork(LayoutWork):
    """The rank's stage, and its tensors. `cut` makes the stage: a layout names devices.

    Numbers of no dimension, such as a learned scale, are held by all ranks.
    """

    def __init__(
        self,
        layout: Layout,
        layers: Sequence[LayerFacts],
        model: torch.nn.Module,
        cut_model: CutModel,
        exchange: Exchange,
        *,
        held: Mapping[str, CutTensors] | None = None,
        widens: bool = False,
    ) -> None:
        """`held`: by name, tensors of another layout of which this rank has some rows.

        `layers` and `widens`: as of `LayoutWork`.
        """
        super().__init__(layout, [], model, exchange, widens=widens)
        if cut_model.not_cut:
            raise BadInput(f"train.layout: the model can't be cut into stages: {cut_model.not_cut}")
        self.summed = []
        self._note_layers(layers)
        self._model, self._cut_model, self._exchange = model, cut_model, exchange
        self._trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._everywhere = {name for name, one in self._trained.items() if not one.dim()}
        # The backward pass reaches the last layers first.
        self._apart = [one.name for one in reversed(layers) if layout.how(one.name) != "sum"]
        """the layers that are late-multiplied or sharded"""
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.cut_tensors = [
            CutTensors(name, {name: one}, exchange, (held or {}).get(name))  # type: ignore[dict-item]
            for name, one in tensors.items()
            if one.dim()
        ]
        self._counters = {name: one for name, one in model.named_buffers() if not one.dim()}
        self.stage: StageStep
        self.gradients: StageGradients
        self.joined: list[JointForward] = []
        """batch norms of the joint batch, or of each micro-batch"""
        self._norms_apart = layout.batch_norm == "micro-batch"
        self._norm_holders: list[RankGroup] = []

    @property
    def place(self) -> StagePlace:
        """Where this rank stands."""
        return self.stage.place

    def micro_batches(self) -> list[int]:
        """The samples of the micro-batches of this rank's pipeline in a full step."""
        return self._layout.pipelines[self.place.pipeline].micro_batches

    # -- who holds what ----------------------------------------------------------------------------

    def _stages_and_holders(
        self, layout: Layout, devices: Sequence[str], own: str = ""
    ) -> tuple[list[list[StageModel]], Holders]:
        stages = stages_of(layout, self._model, self._cut_model, own)
        return stages, holders_of_tensors(layout, devices, stages, self._everywhere)

    def cuts_in(self, layout: Layout, devices: Sequence[str]) -> dict[str, Cuts]:
        """The tensors of each device in another layout; none if that has no stages."""
        if not layout.has_stages:
            return {}
        _, holders = self._stages_and_holders(layout, devices)
        return cuts_of_tensors(layout, devices, self.cut_tensors, holders)

    def cut(self, members: Sequence[int], devices: Sequence[str], device: torch.device) -> None:
        """Keep the stage's tensors only, on the device."""
        self._release_stage()  # of an earlier group
        layout, own = self._layout, devices[self._exchange.rank]
        stages, holders = self._stages_and_holders(layout, devices, own)
        cuts = cuts_of_tensors(layout, devices, self.cut_tensors, holders)
        for one in self.cut_tensors:
            one.cut(cuts[one.name], device)
        pipeline_of = self._take_place(members, devices, stages, device)
        self._divide_layers(holders, cuts)
        trained = {name: ranks for name, ranks in holders.items() if name in self._trained}
        forward = dict.fromkeys(name for one in stages[0] for name in one.parameters)
        ordered = {name: trained[name] for name in forward if name in trained}
        self.gradients = StageGradients(
            self._trained,
            ordered,
            self._exchange,
            layout.chunk_bytes,
            pipeline_of,
            {f"{layer}.{own}" for layer in self._apart for own in ("weight", "bias")},
        )
        self.joined = self._join_batch_norms(holders)
        if layout.schedule == "zero-bubble" and self.place.stages > 1:
            modules = dict(self._model.named_modules())
            names = {name.rpartition(".")[0] for name in self.stage.stage.parameters}
            self.stage.deferred = DeferredWeights(
                {name: modules[name] for name in names}, self.gradients.arrived
            )

    def _take_place(
        self,
        members: Sequence[int],
        devices: Sequence[str],
        stages: Sequence[Sequence[StageModel]],
        device: torch.device,
    ) -> list[int]:
        """Make this rank's stage. Returns the number of the pipeline of each rank."""
        layout = self._layout
        self.members = list(members)
        rank_of = {one: rank for rank, one in enumerate(devices)}
        pipeline_of, self.sharers = [0] * len(devices), [0] * len(devices)
        for number, (pipeline, models) in enumerate(zip(layout.pipelines, stages, strict=True)):
            ranks = [rank_of[stage.device] for stage in pipeline.stages]
            for place, (rank, model) in enumerate(zip(ranks, models, strict=True)):
                pipeline_of[rank], self.sharers[rank] = number, self.members[ranks[0]]
                if rank == self._exchange.rank:
                    before = ranks[place - 1] if place else None
                    after = ranks[place + 1] if place + 1 < len(ranks) else None
                    where = StagePlace(number, place, len(ranks), before, after)
                    self.stage = StageStep(model, where, layout.schedule, self._exchange, device)
        return pipeline_of

    def _divide_layers(self, holders: Holders, cuts: Mapping[str, Cuts]) -> None:
        """Prepare the late-multiplied and sharded layers of the stage."""
        modules: dict[str, Any] = dict(self._model.named_modules())
        for name in self._apart:
            group = holders[weight := f"{name}.weight"]
            if self._exchange.rank not in group:
                continue
            ranks = RankGroup(self._exchange, group)
            if self._layout.how(name) == "factors":
                self._late.append(LateMultiplied(name, modules[name], ranks, self._made))
                continue
            sharded = Sharded(name, modules[name], ranks)
            own = [cuts[weight][rank] for rank in group]
            sharded.is_part(max(end for _, end in own), own)
            self.sharded.append(sharded)
        self._watch_sharded()

    def _join_batch_norms(self, holders: Holders) -> list[JointForward]:
        """Let batch norms use the joint batch of all pipelines, or only the own micro-batch."""
        own, found = self.stage.stage, list[JointForward]()
        if len(self._layout.pipelines) == 1 and not self._norms_apart:
            return []  # torch's own code does
        for name, module in self._model.named_modules():
            state = f"{name}.weight", f"{name}.running_mean"
            held = next((one for one in state if one in own.parameters or one in own.buffers), None)
            if held is not None and is_batch_norm(module):
                ranks = RankGroup(self._exchange, holders[held])
                alone = RankGroup(self._exchange, (self._exchange.rank,))
                found.append(joined_norm(module, alone if self._norms_apart else ranks, name))
                self._norm_holders.append(ranks)
        return found

    def release(self) -> None:
        """Prepare the model for another layout."""
        self._release_stage()

    def _release_stage(self) -> None:
        """Give the stage's modules their own `forward` back, and its parameters their gradients."""
        if not hasattr(self, "gradients"):
            return
        if self.stage.deferred is not None:
            self.stage.deferred.release()
        super().release()
        self._late, self.sharded = [], []
        self.gradients.release()
        for joint in self.joined:
            joint.release()
        self.joined, self._norm_holders = [], []

    @property
    def parts(self) -> list[torch.nn.Parameter]:
        """All parameters: their gradients differ between ranks."""
        return list(self._trained.values())

    def join_statistics(self) -> None:
        """Average the running statistics of batch norms that pipelines have of their own batches.

        All ranks call it at once.
        """
        if not self._norms_apart:
            return
        for one, ranks in zip(self.joined, self._norm_holders, strict=True):
            for statistic in (one.norm.running_mean, one.norm.running_var):
                if statistic is not None:
                    whole = statistic.detach().cpu().to(torch.float64)
                    ranks.sum_(whole, f"{one.name}.statistics")
                    statistic.copy_(whole / ranks.size)

    def join_counters(self) -> None:
        """Give all ranks the counters of batch norms. All ranks call it at once."""
        if not self._counters or not self.is_cut:
            return
        own = self.stage.stage.buffers
        table = torch.zeros(2, len(self._counters), dtype=torch.float64)
        for place, (name, counter) in enumerate(self._counters.items()):
            if name in own:
                table[0, place], table[1, place] = float(counter), 1
        self._exchange.sum_(table, "counters")
        for place, counter in enumerate(self._counters.values()):
            if table[1, place]:
                counter.fill_(float(table[0, place] / table[1, place]))

    # -- a step ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins."""
        super().begin()
        if hasattr(self, "stage"):
            self.stage.abandon()

    def send_rest(self) -> None:
        """After the backward pass: see `LayoutWork.send_rest`."""
        super().send_rest()
        for late in self._late:
            self._note_used(late.name, used=late.used)
        for one in self.sharded:
            self._note_used(one.name, used=one.used)

    def _note_used(self, layer: str, *, used: bool) -> None:
        for own in ("weight", "bias"):
            self.gradients.note_used(f"{layer}.{own}", used=used)

    def finish(self, factor: float = 1.0) -> None:
        """The gradients are complete; those that are summed are not multiplied by `factor` yet."""
        super().finish(factor)
        self.rows_square += factor**2 * self.gradients.held_square()

    def _note_square(self, late: LateMultiplied, square: float) -> None:
        # All ranks' `rows_square` add up to |g|², so that the first holder counts a layer.
        self.rows_square += square if late.exchange.rank == 0 else 0.0
