"""What a rank holds of the state that all ranks train: for checkpoints, and for other ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.checkpoint.files import MODEL, OPTIMIZER
from trainwright.tasks.train.checkpoint.tensors import (
    Tensors,
    load_optimizer,
    optimizer_tensors,
    own_part,
    size_bytes,
)
from trainwright.tasks.train.exchange.collective import take_document, take_from_first
from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.layouts.averaging import VELOCITY, Averaging
from trainwright.tasks.train.layouts.cut_tensors import Cuts, CutTensors
from trainwright.tasks.train.layouts.layout_work import LayoutWork
from trainwright.tasks.train.layouts.row_state import load_rows, row_shapes, written_rows

if TYPE_CHECKING:
    from trainwright.tasks.train.checkpoint.local_checkpoint import LocalCheckpoint


class HeldState:
    """Parameters, buffers and optimizer of a rank; of sharded layers some rows."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    collective: Exchange
    device: torch.device
    averaging: Averaging | None
    _layout: LayoutWork
    _names: dict[int, str]

    def state_bytes(self) -> int:
        """The bytes of model and optimizer, with all rows of sharded layers."""
        total = sum(map(size_bytes, self._common_state().values()))
        for tensors in row_shapes(self).values() if self.is_cut else ():
            for shape, dtype in tensors.values():
                kind: torch.dtype = getattr(torch, dtype)
                total += math.prod(shape) * kind.itemsize
        return total

    def written_state(self, writers: Sequence[int]) -> dict[str, Tensors]:
        """By file: the tensors that this rank writes to a checkpoint, with all their rows.

        All ranks of a group call it at once. `writers` have about equal parts. Tensors that some
        ranks hold alone are written by one of them, if it is a writer: no rank needs memory for
        more than it holds.
        """
        if self.is_cut:
            self._layout.join_counters()
            self._layout.join_statistics()
        peers, common = self.collective, self._common_state()
        own = {}
        if peers.rank in writers:
            own = own_part(common, list(writers).index(peers.rank), len(writers))
        if not self.is_cut:
            return own
        stored, rows = self.model.state_dict().keys(), written_rows(self, writers)
        for name, one in self.model.named_parameters(remove_duplicate=False):
            if (first := self._names[id(one)]) in rows[MODEL]:  # tied ones have several names
                rows[MODEL][name] = rows[MODEL][first]
        for file, tensors in rows.items():
            kept = {name: one for name, one in tensors.items() if file != MODEL or name in stored}
            if kept:
                own.setdefault(file, {}).update(kept)
        return own

    def _common_state(self) -> dict[str, Tensors]:
        """By file: the tensors of which all ranks have all rows."""
        model, optimizer = self.model.state_dict(keep_vars=True), self._optimizer_state()
        if self.is_cut:
            apart = {id(one) for _, one, _ in self._layout.parameters()}
            model = {name: one for name, one in model.items() if id(one) not in apart}
            cut = self.sharded_tensors()[OPTIMIZER]
            optimizer = {name: one for name, one in optimizer.items() if name not in cut}
        return {MODEL: {name: one.detach() for name, one in model.items()}, OPTIMIZER: optimizer}

    def load_checkpoint(
        self,
        checkpoint: LocalCheckpoint | None,
        cuts: Mapping[str, Cuts],
        built: Mapping[str, torch.Tensor],
    ) -> None:
        """Load a checkpoint that the first rank has, of sharded layers the own rows of some cuts.

        All ranks of a group call it; others than the first pass None, and take what all hold whole
        from it later. `built`: as of `load_rows`. Raises TrainingFailed if it does not fit.
        """
        self.optimizer.state.clear()
        if checkpoint is not None and not cuts:
            self.load_state(checkpoint.tensors(MODEL))
            self.load_optimizer_state(checkpoint.tensors(OPTIMIZER))
        elif checkpoint is not None:
            self._require_fit(checkpoint)
            apart = {id(one) for _, one, _ in self._layout.parameters()}
            model = self.model.state_dict(keep_vars=True)
            for name, one in model.items():
                if id(one) not in apart:
                    one.detach().copy_(checkpoint.tensor(MODEL, name))
            names = checkpoint.names(OPTIMIZER)
            cut = {*self.cut_names(names)[OPTIMIZER]}
            some = [one for one in names if one not in cut or not checkpoint.shape(OPTIMIZER, one)]
            self.load_optimizer_state({one: checkpoint.tensor(OPTIMIZER, one) for one in some})
        if cuts:
            load_rows(self, checkpoint, cuts, built)

    def _require_fit(self, checkpoint: LocalCheckpoint) -> None:
        shapes = {name: list(one.shape) for name, one in self.model.state_dict().items()}
        known = {name: checkpoint.shape(MODEL, name) for name in checkpoint.names(MODEL)}
        if unlike := [n for n in sorted({*shapes} | {*known}) if shapes.get(n) != known.get(n)]:
            raise TrainingFailed(
                f"the checkpoint does not fit the model: {unlike[0]} is "
                f"{known.get(unlike[0], 'missing')} in it, {shapes.get(unlike[0], 'missing')} in "
                "the model"
            )

    def cut_names(self, in_optimizer: Sequence[str]) -> dict[str, list[str]]:
        """By file: the names of tensors of which ranks may hold some rows each.

        `in_optimizer`: the names in the optimizer's file to choose from.
        """
        apart = {id(one): name for name, one, _ in self._layout.parameters()}
        numbers = {n for n, one in enumerate(self._in_optimizer()) if id(one) in apart}
        own = [one for one in in_optimizer if not one.startswith(f"{VELOCITY}.")]
        own = [one for one in own if int(one.rpartition(".")[2]) in numbers]
        return {MODEL: [*apart.values()], OPTIMIZER: own}

    def load_state(self, model: dict[str, torch.Tensor]) -> None:
        """Load a checkpoint's parameters and buffers. Raises TrainingFailed if they don't fit."""
        try:
            self.model.load_state_dict(model)
        except RuntimeError as error:
            raise TrainingFailed(f"the checkpoint does not fit the model: {error}") from error

    def load_optimizer_state(self, tensors: Tensors) -> None:
        """Load a checkpoint's optimizer. Raises TrainingFailed if it does not fit."""
        own = {name: one for name, one in tensors.items() if name.startswith(f"{VELOCITY}.")}
        load_optimizer(
            self.optimizer, {name: one for name, one in tensors.items() if name not in own}
        )
        if self.averaging is not None:
            self.averaging.velocities = {name: one.to(self.device) for name, one in own.items()}

    def sharded_tensors(self) -> dict[str, dict[str, tuple[torch.Tensor, CutTensors]]]:
        """By file of a checkpoint, and by name: the tensors of which ranks hold some rows each."""
        model: dict[str, tuple[torch.Tensor, CutTensors]] = {}
        optimizer: dict[str, tuple[torch.Tensor, CutTensors]] = {}
        numbers = {id(one): number for number, one in enumerate(self._in_optimizer())}
        for name, parameter, sharded in self._layout.parameters():
            model[name] = parameter, sharded
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor) and value.dim():
                    optimizer[f"{key}.{numbers[id(parameter)]}"] = value, sharded
        return {MODEL: model, OPTIMIZER: optimizer}

    def sharded_of(self, file: str, name: str) -> CutTensors:
        """The layer of a tensor with rows, by its file and name in a checkpoint."""
        numbers = {id(one): number for number, one in enumerate(self._in_optimizer())}
        number = int(name.rpartition(".")[2]) if file == OPTIMIZER else -1
        return next(
            sharded
            for own, parameter, sharded in self._layout.parameters()
            if (own == name if file == MODEL else numbers.get(id(parameter)) == number)
        )

    def _in_optimizer(self) -> list[torch.nn.Parameter]:
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    @property
    def sharded_layers(self) -> list[CutTensors]:
        """The layers whose rows are on several ranks."""
        return self._layout.cut_tensors

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds only some rows of sharded layers."""
        return self._layout.is_cut

    def hold_nothing(self) -> None:
        """Forget sharded layers and the optimizer's state: others are to come."""
        for sharded in self.sharded_layers:
            sharded.forget()
        self.optimizer.state.clear()

    def take_rows(self, rows: Mapping[str, Tensors], cuts: Mapping[str, Cuts]) -> None:
        """Hold these rows of sharded layers from now on, by file and name; see `move_rows`."""
        numbers = {id(one): number for number, one in enumerate(self._in_optimizer())}
        by_number: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in rows[OPTIMIZER].items():
            key, _, number = name.rpartition(".")
            by_number.setdefault(int(number), {})[key] = value
        for sharded in self.sharded_layers:
            own = cuts.get(sharded.name)
            device = torch.device("cpu") if own is None else self.device
            new = {name: rows[MODEL][name].to(device) for name in sharded.parameters}
            sharded.hold(own, new)
            for parameter in sharded.parameters.values():
                if id(parameter) not in numbers:  # a buffer
                    continue
                state = self.optimizer.state[parameter]
                for key in [one for one, value in state.items() if getattr(value, "ndim", 0)]:
                    del state[key]
                moments = by_number.get(numbers[id(parameter)], {})
                state.update({key: value.to(device) for key, value in moments.items()})

    def average_with(self, source: int, *, holds: bool) -> None:
        """Average all that was done alone, and copy the state of the rank `source` to all.

        `holds`: whether this rank's work counts.
        """
        assert self.averaging is not None
        shapes = self.optimizer_shapes()
        self.expect_optimizer(take_document(self.collective, shapes, "averaged", source))
        self.averaging.average(moments=True, holds=holds)
        self.take_state_from_first(source)

    def take_state_from_first(self, source: int = 0) -> None:
        """Copy parameters, buffers and optimizer state from one rank to all, without sharded rows.

        Needed because different device types round differently.
        """
        apart = (
            {id(one) for _, one, _ in self._layout.parameters()} if self._layout.is_cut else set()
        )
        numbers = [n for n, one in enumerate(self._in_optimizer()) if id(one) in apart]
        every = self.model.state_dict(keep_vars=True).values()
        state = [one for one in every if id(one) not in apart]
        state += [
            one
            for name, one in sorted(optimizer_tensors(self.optimizer).items())
            if not one.dim() or int(name.rpartition(".")[2]) not in numbers
        ]
        if self.averaging is not None:
            state += [one for _, one in sorted(self.averaging.velocities.items())]
        take_from_first(self.collective, state, "state", source)

    def resend(self) -> None:
        """Copy late-multiplied layers and their optimizer state from their first holder to all.

        Every rank multiplies their gradients itself, and unlike processors round differently.
        """
        for ranks, late in self._layout.late_copies:
            moments = [
                value
                for parameter in late
                for _, value in sorted(self.optimizer.state.get(parameter, {}).items())
                if isinstance(value, torch.Tensor) and value.dim()
            ]
            take_from_first(ranks, [*late, *moments], "resend")

    def expect_optimizer(self, shapes: dict[str, list[Any]]) -> None:
        """Allocate an optimizer state to receive another rank's.

        `shapes` is the other rank's `optimizer_shapes`.
        """
        known = self.optimizer_shapes()
        if shapes != known:
            own, held = self._optimizer_state(), self._rows_by_name(shapes)
            tensors = {}
            for name, (shape, kind) in shapes.items():
                rows = held.get(name) if shape else None
                if rows is not None:
                    shape = [rows.rows_held, *shape[1:]]
                tensors[name] = (
                    own[name]
                    if known.get(name) == shapes[name]
                    else torch.zeros(shape, dtype=getattr(torch, kind))
                )
            self.optimizer.state.clear()
            self.load_optimizer_state(tensors)

    def optimizer_shapes(self) -> dict[str, list[Any]]:
        """Shape and type of each tensor of the optimizer's state, with all its rows, by name."""
        tensors, found = self._optimizer_state(), {}
        held = self._rows_by_name(tensors)
        for name, tensor in tensors.items():
            shape = list(tensor.shape)
            rows = held.get(name) if shape else None
            if rows is not None:
                shape[0] = rows.total
            found[name] = [shape, str(tensor.dtype).removeprefix("torch.")]
        return found

    def _rows_by_name(self, names: Iterable[str]) -> dict[str, CutTensors]:
        """The layers of which this rank holds some rows, by these names of the optimizer's tensors.

        Of the outer step of averages, all ranks hold all.
        """
        cut = {
            id(parameter): sharded
            for _, parameter, sharded in self._layout.parameters()
            if sharded.cuts is not None
        }
        every = self._in_optimizer()
        found = {
            name: cut.get(id(every[int(name.rpartition(".")[2])]))
            for name in names
            if not name.startswith(f"{VELOCITY}.")
        }
        return {name: one for name, one in found.items() if one is not None}

    def _optimizer_state(self) -> Tensors:
        """The optimizer's tensors, with those of the outer step of averages."""
        outer = self.averaging.velocities if self.averaging is not None else {}
        return optimizer_tensors(self.optimizer) | outer
