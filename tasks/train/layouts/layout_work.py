"""What a rank does in a step for the layers that are not summed as gradients.

In a layout that averages some layers and not others, all ranks do joint steps: of rank r's loss
(w_r / B) · loss_r, averaged layers keep the rank's own gradient h_r, here divided by w_r / B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train.exchange.group_exchange import Exchange, Started
from trainwright.tasks.train.exchange.rank_group import RankGroup
from trainwright.tasks.train.layouts.cut_tensors import Cuts, CutTensors
from trainwright.tasks.train.layouts.cuts import cuts_among
from trainwright.tasks.train.layouts.factors import Factors, ProductPhase
from trainwright.tasks.train.layouts.late_multiply import LateMultiplied
from trainwright.tasks.train.layouts.sharded import Sharded
from trainwright.tasks.train.out_of_memory import joint_work


class LayoutWork:
    """The layers of a model that a layout does not sum.

    Each step calls `begin`, sets `part` and `last` for each backward pass, then calls `send_rest`
    and `finish`.
    """

    def __init__(
        self,
        layout: Layout,
        layers: Sequence[LayerFacts],
        model: torch.nn.Module,
        exchange: Exchange,
        *,
        held: Mapping[str, CutTensors] | None = None,
        widens: bool = False,
    ) -> None:
        """`held`: by name, layers of another layout of which this rank has some rows.

        `widens`: send numbers of half precision in fp32, as ranks have unlike half types.
        """
        self._layout, self._exchange = layout, exchange
        self._type = torch.bfloat16 if layout.factor_type == "bf16" else None
        how = {one.name: layout.how(one.name) for one in layers}
        modules: dict[str, Any] = dict(model.named_modules())
        # The backward pass reaches the last layers first.
        names = [one.name for one in reversed(layers)]
        self._late = [
            LateMultiplied(name, modules[name], exchange, self._made)
            for name in names
            if how.get(name) == "factors"
        ]
        self.sharded = [
            Sharded(name, modules[name], exchange, (held or {}).get(name))
            for name in names
            if how.get(name) == "rows"
        ]
        self.cut_tensors: list[CutTensors] = [*self.sharded]
        """the tensors of which this rank may hold only some rows"""
        self._widens = widens
        self._watch_sharded()
        apart = {id(one) for late in self._late for one in late.parameters}
        apart |= {id(one) for sharded in self.sharded for one in sharded.parameters.values()}
        known = [name for one in layers for name in one.parameters]
        order = {name: place for place, name in enumerate(known)}
        named = sorted(model.named_parameters(), key=lambda pair: order.get(pair[0], -1))
        rest = [(name, one) for name, one in named if id(one) not in apart]
        averaged = set[int]()
        if layout.averages:
            owner = {name: one.name for one in layers for name in one.parameters}
            averaged = {
                id(one) for name, one in rest if layout.how(owner.get(name, "")) == "average"
            }
        self.averaged = [one for _, one in rest if id(one) in averaged]
        """the parameters that are averaged from time to time"""
        self.summed = [one for _, one in rest if id(one) not in averaged]
        """the parameters whose gradients are summed, in the order of the forward pass"""
        self.share = 1.0
        """w_r / W, this rank's share of the step's loss: that of samples, or of other weights"""
        self._joint_steps = bool(averaged) and not layout.alone
        self.members: list[int] = []
        """the devices' numbers, in the order of ranks"""
        self.sharers: list[int] = []
        """by rank: the number of the device whose share of the batch it computes"""
        self.computed: Callable[[str, ProductPhase, float], None] = lambda *_: None
        """called after a product of the joint batch: layer, phase, samples · share of rows"""
        self._note_layers(layers)
        self.last = True
        """whether this is the step's last backward pass"""
        self.loss_scale = 1.0
        self.own_square, self.joint_square = 0.0, 0.0
        """|h|² of this rank's factors, and |g|² of all ranks' together"""
        self.squares: list[float] = []
        """|h_r|² of each rank's samples in the rows that this rank holds"""
        self.rows_square = 0.0
        """|g|² of the rows that this rank holds"""
        self.overflowed = False
        """whether a factor of this rank is not finite"""
        self._sent: list[tuple[LateMultiplied, Started[list[list[torch.Tensor]]]]] = []
        self._gathered: dict[str, list[Factors]] = {}
        """by layer: the factors of all ranks that are there, but not multiplied yet"""

    def _note_layers(self, layers: Sequence[LayerFacts]) -> None:
        self._rows_per_sample = {
            one.name: one.dense.rows_per_sample for one in layers if one.dense is not None
        }

    def _watch_sharded(self) -> None:
        for each in self.sharded:
            each.computed, each.widens = self._computed, self._widens
        if self.sharded:
            # torch's fused transformer layers would take a module's rows for the whole weight.
            torch.backends.mha.set_fastpath_enabled(False)

    def _computed(self, layer: str, phase: ProductPhase, rows: float) -> None:
        self.computed(layer, phase, rows / self._rows_per_sample[layer])

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds only a part of the model."""
        return any(one.cuts is not None for one in self.cut_tensors)

    @property
    def divides_rows(self) -> bool:
        """Whether all ranks must have the same passes, as they share rows of layers."""
        return bool(self._layout.rows)

    def require_cut(self) -> None:
        """Raises RuntimeError if a sharded layer is not cut: a step would not train it."""
        whole = [one.name for one in self.cut_tensors if one.cuts is None]
        if whole:
            raise RuntimeError(f"a step before `cut`: {', '.join(whole)} would not be trained")

    def cut(self, members: Sequence[int], devices: Sequence[str], device: torch.device) -> None:
        """Keep this rank's rows only, on its device.

        `members` and `devices` are the devices' numbers and ids, in the order of ranks.
        """
        self.members = self.sharers = list(members)
        cuts = self.cuts_in(self._layout, devices)
        for one in self.sharded:
            one.cut(cuts[one.name], device)

    def cuts_in(self, layout: Layout, devices: Sequence[str]) -> dict[str, Cuts]:
        """The rows of each device in another layout, of layers that are sharded in both.

        None of layouts with stages, which cut all tensors.
        """
        if layout.has_stages:
            return {}
        return {
            one.name: cuts_among(layout, one.name, one.total, devices)
            for one in self.sharded
            if layout.sync.get(one.name) == "rows"
        }

    def release(self) -> None:
        """Give all modules their own `forward` back, for another layout."""
        for late in self._late:
            late.release()
        for one in self.sharded:
            one.release()

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, CutTensors]]:
        """The parameters of which this rank may hold only some rows."""
        for one in self.cut_tensors:
            for name, parameter in one.parameters.items():
                yield name, parameter, one

    @property
    def late_copies(self) -> list[tuple[Exchange | RankGroup, list[torch.nn.Parameter]]]:
        """The parameters whose gradients ranks multiply themselves, by the ranks that hold them."""
        found: dict[Sequence[int], tuple[Exchange | RankGroup, list[torch.nn.Parameter]]] = {}
        for late in self._late:
            _, held = found.setdefault(tuple(late.exchange.members), (late.exchange, []))
            held += late.parameters
        return [*found.values()]

    @property
    def parts(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients differ between ranks.

        Those of which this rank holds some rows; and in joint steps the averaged ones.
        """
        found = [parameter for _, parameter, _ in self.parameters()] if self.is_cut else []
        return found + (self.averaged if self._joint_steps else [])

    def joint_norm_square(self, common: float) -> float:
        """|g|² over all ranks; `common` is that of this rank without `parts`.

        Of rows it is that of all rows, of averaged layers Σ_r w_r / W · |g_r|². The rest is the
        first rank's: unlike processors multiply factors with other last digits, and ranks that
        clipped by unlike norms would drift apart in all layers.
        """
        drifts = self._layout is not None and self._layout.resend_every is not None
        if not (self.parts or drifts):
            return common
        square = common if self._exchange.rank == 0 else 0.0
        square += self.rows_square if self.is_cut else 0.0
        if self._joint_steps:
            gradients = [one.grad for one in self.averaged if one.grad is not None]
            square += self.share * sum(float(one.double().square().sum()) for one in gradients)
        own = torch.tensor([square], dtype=torch.float64)
        return float(self._exchange.sum_(own, "norm"))

    def join_statistics(self) -> None:
        """Average the statistics of ranks that have their own ones: none here."""

    def join_counters(self) -> None:
        """Give all ranks the counters that only some of them count: none here."""

    def begin(self) -> None:
        """A step begins."""
        for late in self._late:
            late.begin()
        for one in self.sharded:
            one.begin()
        for parameter in self.averaged:
            parameter.grad = None
        self._sent.clear()
        self._gathered.clear()
        self.own_square, self.joint_square, self.overflowed = 0.0, 0.0, False
        self.squares, self.rows_square = [0.0] * self._exchange.size, 0.0

    def begin_part(self, part: int, *, last: bool) -> None:
        """The forward pass of a micro-batch begins."""
        self.last = last
        self.begin_pass(part)

    def begin_pass(self, part: int) -> None:
        """A pass over a micro-batch begins, forward or backward."""
        for one in self.sharded:
            one.part = part

    def _made(self) -> None:
        """A layer has all its factors of a backward pass: send what is next, in order."""
        while (
            self.last and len(self._sent) < len(self._late) and self._late[len(self._sent)].complete
        ):
            self._send(self._late[len(self._sent)])

    def _send(self, late: LateMultiplied) -> None:
        own = late.own(self.loss_scale, self._type)
        square = late.square(own)
        self.own_square += square
        self.overflowed |= not math.isfinite(square)
        self._sent.append((late, late.gather(own)))

    def send_rest(self) -> None:
        """After the backward pass: send what is left, and make the gradients of sharded layers."""
        for late in self._late[len(self._sent) :]:
            self._send(late)
        for one in self.sharded:
            with joint_work(one.name):
                squares = one.finish(self.loss_scale)
            for rank, square in zip(one.members, squares, strict=True):
                self.squares[rank] += square
            gradients = [each.grad for each in one.parameters.values() if each.grad is not None]
            self.rows_square += sum(float(each.double().square().sum()) for each in gradients)
        self.overflowed |= not math.isfinite(self.rows_square)
        if self._joint_steps and self.loss_scale != 1:
            gradients = [one.grad for one in self.averaged if one.grad is not None]
            self.overflowed |= not all(bool(one.isfinite().all()) for one in gradients)

    def wait(self) -> None:
        """Wait for the factors of all ranks."""
        for late, started in self._sent:
            with joint_work(late.name):
                self._gathered[late.name] = self._finish_gather(started)

    def finish(self, factor: float = 1.0) -> None:
        """Set the gradients from the factors of all ranks, after a wait for those not there yet.

        `factor`: B / W, for all gradients but a rank's own.
        """
        if factor != 1:
            for one in self.sharded:
                made = [own.grad for own in one.parameters.values() if own.grad is not None]
                torch._foreach_mul_(made, factor)
            self.rows_square *= factor**2
        for late, started in self._sent:
            with joint_work(late.name):
                found = self._gathered.pop(late.name, None)
                parts = self._finish_gather(started) if found is None else found
                self._note_square(late, late.finish(parts, factor))
            self._computed(late.name, "weight_gradient", sum(len(one.inputs) for one in parts))
        if self._joint_steps:
            self._own_gradients(self.share / factor * self.loss_scale)

    def _finish_gather(self, started: Started[list[list[torch.Tensor]]]) -> list[Factors]:
        return [Factors(*one) for one in self._exchange.finish(started)]

    def _note_square(self, late: LateMultiplied, square: float) -> None:
        """|g|² of a layer that this rank has multiplied."""
        self.joint_square += square

    def _own_gradients(self, scale: float) -> None:
        """Set the averaged layers' gradients, `scale` times those of this rank's own mean loss."""
        if not self.share:
            for parameter in self.averaged:
                parameter.grad = None
        gradients = [one.grad for one in self.averaged if one.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, scale)
