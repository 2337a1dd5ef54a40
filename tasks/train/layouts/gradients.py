"""Gradients of the joint batch from ranks with unequal batches.

With loss_r the mean over rank r's b_r samples, the mean over all B is Σ_r (b_r / B) · loss_r. So
each rank scales its loss by b_r / B before the backward pass, and the gradients are summed in fp32
or fp64. (Averaging the ranks' means instead would weight their samples wrongly.) If loss_r is a
mean over other things than samples, w_r of them (`estimator.trace.batch_loss`), the factor is
w_r / B, and the sum is multiplied by B / W. W = Σ_r w_r is known only when the passes have ended.

Gradients stand one after another in the order of the backward pass, and are sent in chunks of a
fixed size; a large parameter is in several of them. Each chunk is sent as soon as the backward pass
has filled it, while the pass continues. A model that fits into one chunk needs no hooks for that.
With three or more ranks, the order of additions affects the last digit of a sum, and a replay must
reproduce it: so chunks are the same in every step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.precision import wide
from trainwright.estimator.predict.communication import GRADIENT_BUCKET_BYTES
from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.exchange.collective import Collective
from trainwright.tasks.train.exchange.rank_group import RankGroup


@dataclass
class _SummedChunk:
    """A part of the gradients, flat in host memory, and the parameters that have a share of it."""

    name: str
    flat: torch.Tensor
    parameters: range
    missing: set[int] = field(default_factory=set)
    handle: Any = None


class GradientSum:
    """Sums the gradients of some parameters over all ranks.

    Each step calls `begin`, runs the backward passes, then calls `send_rest` and `finish`.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        collective: Collective | RankGroup,
        chunk_bytes: int = GRADIENT_BUCKET_BYTES,
        device: torch.device | None = None,
        *,
        others_wait: bool = False,
    ) -> None:
        """`parameters` are in the order of the forward pass.

        Their sums are on `device`, in host memory by default. `others_wait`: other sums begin
        after these.
        """
        # The backward pass reaches the last parameters first.
        self.parameters = [one for one in parameters if one.requires_grad][::-1]
        """in the order of their gradients"""
        self._collective = collective
        self._views: list[torch.Tensor] = []
        """the place of each parameter's gradient"""
        self._chunks: list[_SummedChunk] = []
        self._lay_out(chunk_bytes, device or torch.device("cpu"))
        self._numbers = {id(one): number for number, one in enumerate(self.parameters)}
        self._sent = self._filled = 0
        """how many chunks are sent, and how many gradients are in their places"""
        self.own_square = 0.0
        """|h|² of what this rank has sent in this step, h = (w_r / B) · g_r."""
        self.used = [0.0] * len(self.parameters)
        """1 for each parameter that had a gradient in this step, else 0."""
        self.overflowed = False
        """Whether this rank sent a gradient that is not finite."""
        self.loss_scale = 1.0
        """The factor on the loss besides w_r / B."""
        self._squares: list[torch.Tensor] = []
        """of each chunk that is sent"""
        self._widened: dict[int, torch.Tensor] = {}
        """fp32 sums of half-precision gradients over micro-batches, by parameter"""
        self.last = True
        """Whether this is the step's last backward pass; earlier ones only accumulate."""
        self._chunks_of = [
            [at for at, one in enumerate(self._chunks) if number in one.parameters]
            for number in range(len(self.parameters))
        ]
        self.may_send: Callable[[], bool] = lambda: True
        """whether full chunks may leave yet: other sums may have to begin before"""
        self.all_sent: Callable[[], None] = lambda: None
        """called when the last chunk has left"""
        self._hooks: list[Any] = []
        for number, parameter in enumerate(self.parameters):
            if self._is_short(number) or len(self._chunks) > 1 or others_wait:
                hook = partial(self._arrived, number)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _lay_out(self, chunk_bytes: int, device: torch.device) -> None:
        """Allocate the gradients, and divide them into chunks. A chunk has one type."""
        begin = 0
        for dtype, group in groupby(self.parameters, lambda one: wide(one.dtype)):
            counts = [one.numel() for one in group]
            flat = torch.zeros(sum(counts), dtype=dtype, device=device)
            shapes = [one.shape for one in self.parameters[begin : begin + len(counts)]]
            self._views += [
                part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)
            ]
            ends = [*accumulate(counts)]
            size = max(1, chunk_bytes // dtype.itemsize)
            for part in flat.split(size) if len(flat) else ():
                at = part.storage_offset()
                first = bisect_right(ends, at)
                last = bisect_left(ends, at + part.numel())
                parameters = range(begin + first, begin + last + 1)
                self._chunks.append(
                    _SummedChunk(f"gradients.{len(self._chunks)}", part, parameters)
                )
            begin += len(counts)

    def release(self) -> None:
        """Remove all hooks, and drop the gradients: others sum these parameters from now on."""
        for hook in self._hooks:
            hook.remove()
        self.begin()

    def begin(self) -> None:
        """Start a step: drop the gradients of the previous one."""
        for chunk in self._chunks:
            chunk.handle = None
            chunk.missing.update(chunk.parameters)
        for parameter in self.parameters:
            parameter.grad = None
        self._sent = self._filled = 0
        self.own_square = 0.0
        self._squares.clear()
        self._widened.clear()
        self.overflowed = False

    def _is_short(self, number: int) -> bool:
        dtype = self.parameters[number].dtype
        return wide(dtype) != dtype

    def arrived(self, parameter: torch.nn.Parameter) -> None:
        """A gradient was added to a parameter's outside of autograd."""
        if self._hooks:
            self._arrived(self._numbers[id(parameter)], parameter)

    def backward_ended(self, later: Collection[int]) -> None:
        """The backward passes have ended; gradients of `later`, ids of parameters, still come."""
        for number, parameter in enumerate(self.parameters):
            if id(parameter) not in later:
                for at in self._chunks_of[number]:
                    self._chunks[at].missing.discard(number)

    def _arrived(self, number: int, _: torch.Tensor) -> None:
        """A parameter has its gradient of a backward pass."""
        if self._is_short(number):
            self._widen(number)
        places = self._chunks_of[number]
        if not self.last or not places:
            return
        if self._sent > places[0]:
            raise TrainingFailed(
                "model: a parameter receives its gradient in several parts, which is not "
                "supported; if the model uses torch.utils.checkpoint, pass use_reentrant=False"
            )
        for at in places:
            self._chunks[at].missing.discard(number)
        if not self._chunks[places[0]].missing:
            self.send_full()

    def _widen(self, number: int) -> None:
        """Accumulate a half-precision gradient in fp32: `grad` has too few digits for sums."""
        parameter, before = self.parameters[number], self._widened.get(number)
        if parameter.grad is not None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            self._widened[number] = (
                gradient.to(wide(parameter.dtype)) if before is None else before.add_(gradient)
            )
            parameter.grad = None

    def _fill(self, end: int) -> None:
        """Copy the gradients before `end` into their places, zeros for parameters not used."""
        places, gradients = [], []
        for number in range(self._filled, end):
            gradient = self._widened.pop(number, self.parameters[number].grad)
            self.used[number] = float(gradient is not None)
            if gradient is None:
                self._views[number].zero_()
            else:
                places.append(self._views[number])
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if places:
            torch._foreach_copy_(places, gradients)
        self._filled = max(self._filled, end)

    def is_sent(self) -> bool:
        """Whether all chunks have left."""
        return self._sent == len(self._chunks)

    def send_full(self) -> None:
        """Send the next chunks that are full, if they may leave."""
        if self.may_send():
            self._send(only_full=True)

    def _send(self, *, only_full: bool) -> None:
        """Send the next chunks, in order: all ranks must start the same sums in the same order."""
        if self.is_sent():
            return
        while self._sent < len(self._chunks) and not (
            only_full and self._chunks[self._sent].missing
        ):
            chunk = self._chunks[self._sent]
            self._fill(chunk.parameters.stop)
            if self.loss_scale != 1:
                chunk.flat.div_(self.loss_scale)
            # Before the sum, which overwrites the buffer.
            self._squares.append(torch.dot(chunk.flat, chunk.flat))
            if chunk.flat.device.type == "cpu" and not bool(self._squares[-1].isfinite()):
                self.overflowed |= not bool(chunk.flat.isfinite().all())
            chunk.handle = self._collective.start_sum(chunk.flat, chunk.name)
            self._sent += 1
        if self.is_sent():
            self.all_sent()

    def send_rest(self) -> None:
        """Send the remaining chunks after the backward pass."""
        self._send(only_full=False)
        self._fill(len(self.parameters))
        # Once for all chunks: on a GPU, reading a number waits for the backward pass.
        self.own_square = _total(self._squares)
        on_device = any(one.device.type != "cpu" for one in self._squares)
        self.overflowed |= on_device and not math.isfinite(self.own_square)

    def wait(self) -> None:
        """Wait until all sums have ended here."""
        for chunk in self._chunks:
            if chunk.handle is not None:
                self._collective.finish(chunk.handle)
            chunk.handle = None

    def finish(self, used_anywhere: Sequence[float], factor: float = 1.0) -> None:
        """Set every `grad` to the sum over ranks times `factor`; None if no rank used it.

        `used_anywhere` is the sum of `used` over ranks, `factor` is B / W.
        """
        self.wait()
        if factor != 1:
            for chunk in self._chunks:
                chunk.flat.mul_(factor)
        for parameter, view, used in zip(self.parameters, self._views, used_anywhere, strict=True):
            parameter.grad = view.to(parameter.device, parameter.dtype) if used else None

    def joint_square(self) -> float:
        """|g|² of the summed gradient, after `finish`."""
        return _total([torch.dot(chunk.flat, chunk.flat) for chunk in self._chunks])


def _total(numbers: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([one.double() for one in numbers]).sum()) if numbers else 0.0


def clip(
    parameters: Iterable[torch.nn.Parameter],
    bound: float,
    parts: Sequence[torch.nn.Parameter] = (),
    joint_square: Callable[[float], float] = lambda square: square,
) -> float:
    """Scale the parameters' gradients so that their norm is at most `bound`. Returns its square.

    `joint_square` gives |g|² over all ranks from that of this rank without `parts`, of which it
    holds only some rows.
    The norm is computed in float64: ranks with different numbers of threads add in different
    orders, but must get the same result.
    """
    own = {id(one) for one in parts}
    gradients = [one.grad for one in parameters if one.grad is not None and id(one) not in own]
    norms = torch._foreach_norm(gradients, dtype=torch.float64) if gradients else []
    square = joint_square(sum(float(value) ** 2 for value in norms))
    norm = square**0.5
    if norm > bound:
        gradients += [one.grad for one in parts if one.grad is not None]
        torch._foreach_mul_(gradients, bound / (norm + 1e-6))
    return square
