"""One rank's copy of model and optimizer, with its data and its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.devices import half_precision
from trainwright.estimator.precision import PARAMETER_DTYPES, cast, wide
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.source import ADAPT_ROWS, ModelDefinition
from trainwright.tasks.data import dataset as data
from trainwright.tasks.data.model_reader import ModelReader
from trainwright.tasks.data.sources import require_content
from trainwright.tasks.errors import BadInput, TrainingFailed
from trainwright.tasks.train.batch.sampling import epoch_order
from trainwright.tasks.train.checkpoint.files import MODEL, OPTIMIZER
from trainwright.tasks.train.checkpoint.tensors import Tensors, load_optimizer, optimizer_tensors
from trainwright.tasks.train.exchange.collective import take_from_first
from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.layouts.averaging import VELOCITY, Averaging
from trainwright.tasks.train.layouts.layout_work import LayoutWork
from trainwright.tasks.train.layouts.row_state import row_shapes, whole_rows
from trainwright.tasks.train.layouts.sharded import Sharded
from trainwright.tasks.train.rank import keyed_dropout
from trainwright.tasks.train.rank.batch_loader import BatchLoader, BatchTensors
from trainwright.tasks.train.rank.batch_norm import join_batch_norms
from trainwright.tasks.train.rank.optimizer import make_optimizer
from trainwright.tasks.train.rank.validation_metrics import naive_error
from trainwright.tasks.train.request import TrainRequest

NAIVE_ROWS = 1 << 16
"""The most rows from which the scale of MASE is made."""
_READ_ROWS = 1024


class Replica:
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
        self._naive: float | None = None
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
        self.model = self._newly_built()
        for name, parameter in self.model.named_parameters():
            if parameter.is_complex() and parameter.requires_grad:
                raise BadInput(
                    f"model: the parameter {name} is "
                    f"{str(parameter.dtype).removeprefix('torch.')}, but gradients can only be "
                    "summed as real numbers; store its real and imaginary parts, and join them by "
                    "torch.view_as_complex"
                )
        self.model.train()
        self._loss: Callable[[Any, Any], torch.Tensor] = model_source.loss_function(
            definition, request.schema_.task, self.spec.label_smoothing
        )
        self._validation_loss = model_source.loss_function(definition, request.schema_.task)
        self._definition = definition
        plan = request.plan
        # Ranks that train alone use the statistics of their own batches.
        self.alone = plan.layout is not None and plan.layout.alone
        """whether ranks train alone between averages"""
        self._joined = [] if self.alone else join_batch_norms(self.model, self.collective)
        self._layout = LayoutWork(
            plan.layout, plan.layers, self.model, self.collective, widens=self._unlike_halves()
        )
        self.optimizer = make_optimizer(
            self.model.parameters(), self.spec.optimizer, request.learning_rate
        )
        self.averaging: Averaging | None = None
        if plan.layout is not None and plan.layout.averages:
            self.averaging = Averaging(
                self._layout.averaged,
                # In joint steps, statistics are of the joint batch.
                list(self.model.buffers()) if self.alone else [],
                self.optimizer,
                self.collective,
                plan.layout.average_every or 1,
                plan.layout.outer,
            )

    def _newly_built(self) -> torch.nn.Module:
        torch.manual_seed(self.spec.seed)
        return cast(self._new(), self.spec.precision).to(self.device)

    def begin_anew(self) -> None:
        """Reset parameters, buffers and optimizer to their initial state."""
        self.model.load_state_dict(self._newly_built().state_dict())
        self.optimizer.state.clear()
        if self.averaging is not None:
            self.averaging.begin_anew()

    def adapt(self) -> None:
        """Let the model's source set its initial state from training rows, if it defines `adapt`.

        The rows are the same on all ranks: evenly spaced ones, at most ADAPT_ROWS.
        """
        if self._definition.adapt is None:
            return
        rows = self.train_rows[:: -(-len(self.train_rows) // ADAPT_ROWS)]
        inputs, targets = self._given(self.loader.rows(rows))
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
        self._layout.cut(members)
        for _, parameter, sharded in self._layout.parameters():
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = sharded.own_rows(value)

    def whole_state(self) -> tuple[Tensors, Tensors]:
        """The tensors of model and optimizer, with all rows of sharded layers.

        All ranks of a group call it at once. Only sharded tensors are copies.
        """
        model, optimizer = self.model.state_dict(), optimizer_tensors(self.optimizer)
        if self._layout.is_cut:
            for file, tensors in whole_rows(self, row_shapes(self), holds=True).items():
                (model if file == MODEL else optimizer).update(tensors)
        if self.averaging is not None:
            optimizer.update(self.averaging.velocities)
        return model, optimizer

    def load_optimizer_state(self, tensors: Tensors) -> None:
        """Load a checkpoint's optimizer. Raises TrainingFailed if it does not fit."""
        own = {name: one for name, one in tensors.items() if name.startswith(f"{VELOCITY}.")}
        load_optimizer(
            self.optimizer, {name: one for name, one in tensors.items() if name not in own}
        )
        if self.averaging is not None:
            self.averaging.velocities = {name: one.to(self.device) for name, one in own.items()}

    def sharded_tensors(self) -> dict[str, dict[str, tuple[torch.Tensor, Sharded]]]:
        """By file of a checkpoint, and by name: the tensors of which ranks hold some rows each."""
        model: dict[str, tuple[torch.Tensor, Sharded]] = {}
        optimizer: dict[str, tuple[torch.Tensor, Sharded]] = {}
        numbers = {id(one): number for number, one in enumerate(self._in_optimizer())}
        for name, parameter, sharded in self._layout.parameters():
            model[name] = parameter, sharded
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor) and value.dim():
                    optimizer[f"{key}.{numbers[id(parameter)]}"] = value, sharded
        return {MODEL: model, OPTIMIZER: optimizer}

    def _in_optimizer(self) -> list[torch.nn.Parameter]:
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    def rows_of_layers(self) -> list[tuple[int, int]]:
        """By sharded layer: how many rows this rank has, and how many there are."""
        return [(one.rows_held, one.total) for one in self._layout.sharded]

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds only some rows of sharded layers."""
        return self._layout.is_cut

    def hold_all_rows(self, rows: Mapping[str, Tensors] | None = None) -> None:
        """Hold all rows of sharded layers again: these, by file; None: those of a new model."""
        if not self._layout.sharded:
            return
        if rows is None:
            rows = {MODEL: dict(self._newly_built().state_dict()), OPTIMIZER: {}}
        numbers = {id(one): number for number, one in enumerate(self._in_optimizer())}
        for sharded in self._layout.sharded:
            sharded.join({name: rows[MODEL][name].to(self.device) for name in sharded.parameters})
            for parameter in sharded.parameters.values():
                state = self.optimizer.state.get(parameter, {})
                for key in [one for one, value in state.items() if getattr(value, "ndim", 0)]:
                    whole = rows[OPTIMIZER].get(f"{key}.{numbers[id(parameter)]}")
                    state[key] = (
                        whole.to(self.device)
                        if whole is not None
                        else torch.zeros_like(parameter, dtype=state[key].dtype)
                    )

    def take_state_from_first(self, source: int = 0) -> None:
        """Copy parameters, buffers and optimizer state from one rank to all, without sharded rows.

        Needed because different device types round differently.
        """
        apart = (
            {id(one) for _, one, _ in self._layout.parameters()} if self._layout.is_cut else set()
        )
        numbers = [n for n, one in enumerate(self._in_optimizer()) if id(one) in apart]
        names = {name for name, one in self.model.named_parameters() if id(one) in apart}
        state = [one for name, one in self.model.state_dict().items() if name not in names]
        state += [
            one
            for name, one in optimizer_tensors(self.optimizer).items()
            if int(name.rpartition(".")[2]) not in numbers
        ]
        if self.averaging is not None:
            state += [one for _, one in sorted(self.averaging.velocities.items())]
        take_from_first(self.collective, state, "state", source)

    def _unlike_halves(self) -> bool:
        """Whether the plan's devices compute in unlike types of half precision."""
        types = {half_precision(device.type) for device in self.request.plan.devices}
        return self.spec.precision == "amp" and len(types) > 1

    def resend(self) -> None:
        """Copy late-multiplied layers and their optimizer state from the first rank to all.

        Every rank multiplies their gradients itself, and unlike processors round differently.
        """
        late = self._layout.late_parameters
        moments = [
            value
            for parameter in late
            for _, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor) and value.dim()
        ]
        take_from_first(self.collective, [*late, *moments], "resend")

    def expect_optimizer(self, shapes: dict[str, list[Any]]) -> None:
        """Allocate an optimizer state to receive another rank's.

        `shapes` is the other rank's `optimizer_shapes`.
        """
        if shapes != self.optimizer_shapes():
            tensors = {
                name: torch.zeros(shape, dtype=getattr(torch, kind))
                for name, (shape, kind) in shapes.items()
            }
            self.optimizer.state.clear()
            self.load_optimizer_state(tensors)

    def optimizer_shapes(self) -> dict[str, list[Any]]:
        """Shape and type of each tensor of the optimizer's state, by name."""
        return {
            name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in self._optimizer_state().items()
        }

    def _optimizer_state(self) -> Tensors:
        """The optimizer's tensors, with those of the outer step of averages."""
        outer = self.averaging.velocities if self.averaging is not None else {}
        return optimizer_tensors(self.optimizer) | outer

    def load_state(self, model: dict[str, torch.Tensor]) -> None:
        """Load a checkpoint's parameters and buffers. Raises TrainingFailed if they don't fit."""
        try:
            self.model.load_state_dict(model)
        except RuntimeError as error:
            raise TrainingFailed(f"the checkpoint does not fit the model: {error}") from error

    def _given(self, rows: BatchTensors) -> tuple[Any, torch.Tensor]:
        """Inputs and targets as the model and the loss get them, on the rank's device."""
        found, targets = rows
        inputs = {name: self._to_device(tensor, self._dtype) for name, tensor in found.items()}
        targets = self._to_device(targets, wide(self._dtype))
        return next(iter(inputs.values())) if len(inputs) == 1 else inputs, targets

    def _naive_error(self) -> float | None:
        """The scale of MASE: the error of the naive one-step forecast on the training rows.

        From at most `NAIVE_ROWS` evenly spaced rows. None unless it is a forecast from an input
        `history`, (rows, times).
        """
        schema = self.request.schema_
        if schema.task != "forecasting" or len(schema.inputs.get("history", ())) != 1:
            return None
        if self._naive is None:
            spaced = self.train_rows[:: -(-len(self.train_rows) // NAIVE_ROWS)]
            last, following = [], []
            for inputs, targets in self.loader.in_turn(spaced, _READ_ROWS):
                last.append(inputs["history"][:, -1].clone())
                following.append(targets.reshape(len(targets), -1)[:, 0].clone())
            self._naive = naive_error(torch.cat(last), torch.cat(following))
        return self._naive

    def _correct(self, outputs: Any, targets: torch.Tensor) -> float:
        if not self.classifies or not isinstance(outputs, torch.Tensor):
            return 0.0
        return float((outputs.argmax(dim=1) == targets).sum())
