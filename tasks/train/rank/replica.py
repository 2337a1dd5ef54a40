"""One rank's copy of model and optimizer, with its data and its device."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.devices import half_precision
from trainwright.estimator.precision import PARAMETER_DTYPES, cast, wide
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.batch_loss import loss_function
from trainwright.estimator.trace.source import ADAPT_ROWS, ModelDefinition
from trainwright.estimator.trace.trainable_model import require_trainable
from trainwright.tasks.data import dataset as data
from trainwright.tasks.data.model_reader import ModelReader
from trainwright.tasks.data.sources import require_content
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train.batch.sampling import epoch_order
from trainwright.tasks.train.exchange.collective import take_from_first
from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.exchange.rank_group import RankGroup
from trainwright.tasks.train.layouts.averaging import Averaging
from trainwright.tasks.train.layouts.batch_norm import JointForward, join_batch_norms
from trainwright.tasks.train.layouts.cut_tensors import Cuts, CutTensors, is_blank
from trainwright.tasks.train.layouts.layout_work import LayoutWork
from trainwright.tasks.train.layouts.row_state import move_rows
from trainwright.tasks.train.passes import keyed_dropout
from trainwright.tasks.train.passes.recomputed import Recomputed
from trainwright.tasks.train.pipeline.recomputed_model import RecomputedModel, recompute_in
from trainwright.tasks.train.pipeline.stage_work import StageWork
from trainwright.tasks.train.rank.batch_loader import BatchLoader, BatchTensors
from trainwright.tasks.train.rank.held_state import HeldState
from trainwright.tasks.train.rank.optimizer import make_optimizer
from trainwright.tasks.train.rank.partial_build import PartialBuild, named_tensors
from trainwright.tasks.train.request import TrainRequest

if TYPE_CHECKING:
    from trainwright.estimator.trace.cuts.model_cuts import CutModel
    from trainwright.tasks.train.checkpoint.local_checkpoint import LocalCheckpoint


class Replica(HeldState):
    """A model with the same parameters as on all other ranks, its optimizer and its data.

    `number` is the index of its device in the plan and never changes. Its rank in `collective`
    changes with the members.
    """

    def __init__(
        self,
        request: TrainRequest,
        dataset: data.Dataset | ModelReader,
        collective: Exchange,
        device: torch.device,
        number: int,
        definition: ModelDefinition | None = None,
    ) -> None:
        """`definition`: the model's source, if it is loaded already."""
        keyed_dropout.install()
        self.request, self.collective, self.device, self.number = (
            request,
            collective,
            device,
            number,
        )
        self.spec = request.job.train
        self.work = Path(request.work_folder)
        self.classifies = request.schema_.task.endswith("classification")
        self._dtype = PARAMETER_DTYPES[self.spec.precision]
        self._take(dataset)
        self._build_model(
            definition or model_source.load(Path(request.source_folder), request.entry)
        )

    @property
    def first(self) -> bool:
        """Whether this rank reports and writes on behalf of all."""
        return self.collective.rank == 0

    def memory_bytes(self) -> float:
        """The memory available to this rank: what it holds plus what is free."""
        if self.device.type == "cuda":
            return float(
                torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
            )
        import psutil

        return float(psutil.virtual_memory().available + psutil.Process().memory_info().rss)

    def _take(self, dataset: data.Dataset | ModelReader) -> None:
        request = self.request
        require_content(request.job.data, dataset.schema.sha256, request.schema_.sha256)
        self.train_rows, self.validation_rows = dataset.split.train, dataset.split.validation
        self.dataset = dataset
        self.loader = BatchLoader(dataset, self.device)

    def epoch_order(self, epoch: int) -> Any:
        """The training rows in the order of an epoch, which begins."""
        self.loader.begin_epoch(epoch)
        return epoch_order(self.train_rows, self.spec.seed, epoch, self.dataset.row_bytes)

    def _to_device(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(self.device, dtype if tensor.is_floating_point() else tensor.dtype)

    def _build_model(self, definition: ModelDefinition) -> None:
        request = self.request
        torch.set_default_dtype(self._dtype)
        self._new: Callable[[], torch.nn.Module] = lambda: model_source.build(
            definition, request.job.model.config if request.job.model else {}
        )
        self._parts = PartialBuild(self._built_whole)
        # Stages get what they hold when they know with whom they train.
        self.model = self._newly_built(() if request.layout.has_stages else None)
        modules = dict(self.model.named_modules())
        syncs = request.layout.sync.items()
        sharded = [name for name, sync in syncs if sync == "rows" and name in modules]
        rows: list[torch.Tensor] = [one for name in sharded for one in modules[name].parameters()]
        if request.layout.has_stages:
            rows = [*self.model.parameters(), *self.model.buffers()]
        self._place(rows)
        require_trainable(self.model)
        self.model.train()
        task = request.schema_.task
        self._loss = loss_function(definition, task, self.spec.label_smoothing)
        self._validation_loss = loss_function(definition, task)
        self._definition = definition
        self.optimizer = make_optimizer(
            self.model.parameters(), self.spec.optimizer, request.learning_rate
        )
        self._names = {id(one): name for name, one in self.model.named_parameters()}
        self._joined: list[JointForward] = []
        self._again: list[Recomputed | RecomputedModel] = []
        self.averaging: Averaging | None = None
        self._follow(request.layout)

    def _place(self, rows: Iterable[torch.Tensor]) -> None:
        """Move all to the device but `rows`, whole copies of sharded layers: `cut` moves theirs."""
        if self.device.type == "cpu":
            return
        apart = {id(one) for one in rows}
        self.model._apply(lambda one: one if id(one) in apart else one.to(self.device))

    def _follow(self, layout: Layout, held: Mapping[str, CutTensors] | None = None) -> None:
        """Prepare the model for the steps of a layout; `held`: layers of which it has some rows."""
        self.layout = layout
        self.alone = layout.alone
        """whether ranks train alone between averages"""
        for joint in self._joined:
            joint.release()
        # Ranks that train alone use the statistics of their own batches.
        alone = self.alone or layout.has_stages
        self._joined = [] if alone else join_batch_norms(self.model, self.collective)
        self._layout = self._work_of(layout, held)
        self._again = self._recompute()
        before, self.averaging = self.averaging, None
        if layout.averages:
            self.averaging = Averaging(
                self._layout.averaged,
                # In joint steps, statistics are of the joint batch.
                list(self.model.buffers()) if self.alone else [],
                self.optimizer,
                self.collective,
                layout.average_every or 1,
                layout.outer,
            )
            if before is not None:
                self.averaging.continue_from(before)

    def _work_of(self, layout: Layout, held: Mapping[str, CutTensors] | None) -> LayoutWork:
        layers, widens = self.request.layers_in(layout), self._unlike_halves()
        if layout.has_stages:
            cut = self._cut_model
            return StageWork(
                layout, layers, self.model, cut, self.collective, held=held, widens=widens
            )
        return LayoutWork(layout, layers, self.model, self.collective, held=held, widens=widens)

    @functools.cached_property
    def _cut_model(self) -> CutModel:
        """Where the model can be cut into stages: the same on all ranks."""
        # Loaded by pipelines only: these import torch's compiler.
        from trainwright.estimator.trace.cuts.model_cuts import cut_step
        from trainwright.estimator.trace.training_step import TrainingStepSpec
        from trainwright.tasks.extract import batch_spec

        job = self.request.job
        config = job.model.config if job.model else {}
        what = TrainingStepSpec(
            self._definition,
            config,
            batch_spec(self.request.schema_),
            self.spec.optimizer.model_dump(),
            self.spec.precision,
        )
        return cut_step(what, self.device.type)

    def adopt(self, layout: Layout) -> None:
        """Train by another layout from now on; all else stays. `cut` follows.

        Raises RuntimeError if the rank holds only some rows of a layer that the layout does not
        shard.
        """
        if layout == self.layout:
            self._allocate()
            return
        held = {one.name: one for one in self.sharded_layers if one.cuts is not None}
        stays = held if layout.has_stages else {n for n in held if layout.sync.get(n) == "rows"}
        if lacking := [name for name in held if name not in stays]:
            raise RuntimeError(
                f"the layout {layout.name}: before it, ranks must hold all rows of "
                f"{', '.join(lacking)}"
            )
        for module in self._again:
            module.release()
        self._layout.release()
        gc.collect()  # a graph that is left would expect gradients of some rows
        self._follow(layout, held)
        rows = [one for _, one, sharded in self._layout.parameters() if sharded.cuts is None]
        self._place(rows)
        for parameter in {*self.optimizer.state} - {*rows}:
            state = self.optimizer.state[parameter]
            moments = [key for key, one in state.items() if getattr(one, "ndim", 0)]
            state.update({key: state[key].to(parameter.device) for key in moments})
        self._allocate()

    def _allocate(self) -> None:
        """Give memory to what every rank of the layout holds whole: its values are to come."""
        apart = {id(one) for _, one, _ in self._layout.parameters()}
        for one in named_tensors(self.model).values():
            if id(one) not in apart and is_blank(one):
                one.data = torch.zeros(one.shape, dtype=one.dtype, device=self.device)

    def _recompute(self) -> list[Recomputed | RecomputedModel]:
        """Do what the layout says again in backward passes; a stage does it by itself."""
        names = self._recomputed()
        if self.layout.has_stages or not names:
            return []
        return recompute_in(self.model, names, lambda: self._cut_model)

    def _recomputed(self) -> list[str]:
        """The modules of this rank whose forward pass is done again in the backward pass."""
        return self.layout.recomputed(self.request.plan.devices[self.number].id)

    def _newly_built(self, held: Collection[str] | None = None) -> torch.nn.Module:
        """The model in its initial state; `held`: only these tensors of it have values."""
        return self._built_whole() if held is None else self._parts.part(held)

    def _built_whole(self) -> torch.nn.Module:
        torch.manual_seed(self.spec.seed)
        return cast(self._new(), self.spec.precision)

    def begin_anew(self, members: Sequence[int] | None = None) -> None:
        """Take the initial state of parameters, buffers and optimizer.

        Of sharded layers, what this rank holds among `members`; None: all. All members call it.
        """
        # What the source does with training rows takes the whole model.
        whole = members is None or self._definition.adapt is not None
        cuts = {} if members is None or whole else self.cuts_in(self.layout, members)
        held = self._held_in(cuts)
        if held is not None:
            self.hold_nothing()
        new = named_tensors(self._newly_built(held))
        self.optimizer.state.clear()
        apart = {id(one) for _, one, _ in self._layout.parameters()}
        for name, one in named_tensors(self.model).items():
            if id(one) not in apart:
                one.detach().copy_(new[name])
        for sharded in self.sharded_layers:
            rows = cuts.get(sharded.name)
            begin, end = (0, sharded.total) if rows is None else rows[self.collective.rank]
            device = torch.device("cpu") if rows is None else self.device
            some = end - begin < sharded.total
            copies = {
                name: new[name].detach()[begin:end].to(device, copy=some)
                for name in sharded.parameters
            }
            sharded.hold(rows, copies)
        if held is not None:
            self._join_copies(cuts)
        if self.averaging is not None:
            self.averaging.begin_anew()

    def _held_in(self, cuts: Mapping[str, Cuts]) -> set[str] | None:
        """The tensors of which a stage holds rows in some cuts; None: all of them."""
        if not self.layout.has_stages or not cuts:
            return None
        own = {name: rows[self.collective.rank] for name, rows in cuts.items()}
        return {name for name, (begin, end) in own.items() if begin < end}

    def _join_copies(self, cuts: Mapping[str, Cuts]) -> None:
        """Give all holders of a tensor the first one's: processors of unlike types may differ."""
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for one in self.sharded_layers:
            rows = cuts[one.name]
            ranks = tuple(number for number, (begin, end) in enumerate(rows) if begin < end)
            if len({*rows} - {(0, 0)}) == 1 and len(ranks) > 1:
                groups.setdefault(ranks, []).extend(one.parameters.values())
        for ranks, tensors in sorted(groups.items(), key=lambda pair: pair[0]):
            if self.collective.rank in ranks:
                take_from_first(RankGroup(self.collective, ranks), tensors, f"initial {ranks}")

    def resume(self, checkpoint: LocalCheckpoint | None, members: Sequence[int]) -> None:
        """Take the state of a checkpoint that the first rank has; see `load_checkpoint`."""
        cuts = self.cuts_in(self.layout, members)
        built: dict[str, torch.Tensor] = {}
        if cuts:
            self.hold_nothing()
        stored = self.model.state_dict().keys()
        unstored = {name for name, _ in self.model.named_buffers() if name in cuts} - stored
        if unstored:
            held = self._held_in(cuts) or set()
            new = named_tensors(self._newly_built(unstored & held))
            for name in unstored:
                begin, end = cuts[name][self.collective.rank]
                built[name] = new[name].detach()[begin:end].clone()
        if self.averaging is not None:
            self.averaging.begin_anew()
        self.load_checkpoint(checkpoint, cuts, built)

    def adapt(self) -> None:
        """Let the model's source set its initial state from training rows, if it defines `adapt`.

        The rows are the same on all ranks: evenly spaced ones, at most ADAPT_ROWS.
        """
        if self._definition.adapt is None:
            return
        self.model.to(self.device)  # sharded layers too: it runs the whole model
        rows = self.train_rows[:: -(-len(self.train_rows) // ADAPT_ROWS)]
        inputs, targets = self.given(self.loader.rows(rows))
        torch.manual_seed(self.spec.seed)
        self.model.eval()  # statistics of batches stay as they are
        model_source.adapt(self._definition, self.model, inputs, targets, self.dataset.names())
        self.model.train()

    def cut(self, members: Sequence[int]) -> None:
        """The ranks of a group have the same state: keep this rank's rows of sharded layers only.

        In model and optimizer. `members`: the devices' numbers, in the order of ranks.
        """
        if self.averaging is not None:
            self.averaging.begin()
        whole = [
            (parameter, sharded)
            for _, parameter, sharded in self._layout.parameters()
            if sharded.cuts is None
        ]
        self._layout.cut(members, self._ids(members), self.device)
        for parameter, sharded in whole:
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = sharded.own_rows(value, self.device)

    def _ids(self, members: Sequence[int]) -> list[str]:
        return [self.request.plan.devices[number].id for number in members]

    def cuts_in(self, layout: Layout, members: Sequence[int]) -> dict[str, Cuts]:
        """The rows of these devices in a layout, of layers that are sharded in it and now."""
        return self._layout.cuts_in(layout, self._ids(members))

    def change_layout(self, layout: Layout, members: Sequence[int]) -> None:
        """All ranks of a group, in the same state, train by another layout from now on."""
        if self.averaging is not None:
            self.averaging.average(moments=True)
        move_rows(self, 0, self.cuts_in(layout, members), holds=True)
        self.take_state_from_first()
        self.adopt(layout)
        self.cut(members)

    def _unlike_halves(self) -> bool:
        """Whether the plan's devices compute in unlike types of half precision."""
        types = {half_precision(device.type) for device in self.request.plan.devices}
        return self.spec.precision == "amp" and len(types) > 1

    def given(self, rows: BatchTensors) -> tuple[Any, torch.Tensor]:
        """Inputs and targets as the model and the loss get them, on the rank's device."""
        found, targets = rows
        inputs = {name: self._to_device(tensor, self._dtype) for name, tensor in found.items()}
        targets = self._to_device(targets, wide(self._dtype))
        return model_source.nested(inputs, self.dataset.schema.nesting), targets

    def correct(self, outputs: Any, targets: torch.Tensor) -> float:
        if not self.classifies or not isinstance(outputs, torch.Tensor):
            return 0.0
        return float((outputs.argmax(dim=1) == targets).sum())
