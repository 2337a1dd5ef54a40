"""Dropout whose masks do not depend on how a step is divided among ranks.

The mask of a sample is a function of (seed, step, call, sample): `call` counts the dropouts of a
forward pass, `sample` is the place in the joint batch. It comes from a counter-based generator
(Philox: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), so that a rank
makes only the masks of its own samples. The probability is rounded to 1 / 65,536.

torch's own masks come from one stream for each rank, and change with the ranks. This replaces the
functions of `torch.nn.functional` in a rank's process; the fused dropout inside recurrent layers
stays torch's.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch  # noqa: TID253 - only ranks import this
from torch.nn import functional  # noqa: TID253

_LEVELS = 1 << 16
_BLOCK = 16
"""Values of 16 bits that one count of the generator gives."""
_ALPHA = -1.7580993408473766
"""The value of dropped inputs in alpha dropout: −λα of SELU (G. Klambauer et al., 2017)."""


class DropoutPass:
    """A forward pass of some samples of the joint batch, and its backward pass."""

    def __init__(self) -> None:
        self.seed = self.step = self.begin = self.samples = self.first_call = 0
        """no samples: dropout is torch's"""
        self.known: dict[int, int] = {}
        """the number of each call, by a number that torch drew for it"""
        self.again: int | None = None
        """the number of the next call, in a part of the pass that is done again"""

    def call(self) -> int:
        """The number of this call in the forward pass.

        If a model recomputes activations itself, torch restores its random numbers and draws the
        same again.
        """
        drawn = int(torch.randint(1 << 62, ()))
        if self.again is not None:
            self.again += 1
            return self.again - 1
        if drawn not in self.known:
            self.known[drawn] = self.first_call + len(self.known)
        return self.known[drawn]


class _Passes(threading.local):
    """The pass of each thread that began one."""

    def __init__(self) -> None:
        self.own: DropoutPass | None = None


_passes = _Passes()
_latest = [DropoutPass()]
"""The pass that began last in this process.

A backward pass on a GPU runs in a thread of torch's, and so does what it computes again.
"""
_torch: dict[str, Callable[..., Any]] = {}


def _now() -> DropoutPass:
    return _passes.own or _latest[0]


def begin_pass(seed: int, step: int, begin: int, samples: int, first_call: int = 0) -> DropoutPass:
    """A forward pass begins, of the samples [begin, begin + samples) of the joint batch.

    `first_call`: the number of its first dropout, if it begins amid the model (`StageModel`).
    """
    found = DropoutPass()
    found.seed, found.step, found.begin, found.samples = seed, step, begin, samples
    found.first_call = first_call
    resume(found)
    return found


def resume(begun: DropoutPass) -> None:
    """The backward pass of a forward pass begins, after other passes.

    What it computes again gets the masks of its forward pass.
    """
    _passes.own, _latest[0] = begun, begun


def end_pass() -> None:
    """The forward pass and its backward pass have ended."""
    _now().samples = 0


def next_call() -> int:
    """The number of the next dropout of the forward pass."""
    now = _now()
    return now.first_call + len(now.known)


@contextlib.contextmanager
def calls_from(number: int) -> Iterator[None]:
    """A part of the forward pass is done again inside, from this number of its dropouts on."""
    now = _now()
    before, now.again = now.again, number
    try:
        yield
    finally:
        now.again = before


def install() -> None:
    """Replace torch's functions in this process; again without effect."""
    if _torch:
        return
    for name, mine in (
        ("dropout", _dropout),
        ("dropout1d", _of_channels),
        ("dropout2d", _of_channels),
        ("dropout3d", _of_channels),
        ("alpha_dropout", _alpha),
        ("scaled_dot_product_attention", _attention),
    ):
        _torch[name] = getattr(functional, name)
        setattr(functional, name, _replaced(name, mine))


def _replaced(name: str, mine: Callable[..., Any]) -> Callable[..., Any]:
    original = _torch[name]

    def function(*args: Any, **kwargs: Any) -> Any:
        return mine(original, *args, **kwargs) if _now().samples else original(*args, **kwargs)

    function.__name__, function.__doc__ = name, original.__doc__
    return function


def _dropout(
    original: Callable[..., Any],
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    dims: int | None = None,
) -> torch.Tensor:
    """With a mask over the first `dims` dimensions; None: over all."""
    kept = _mask(input.shape[:dims], p, input.device) if training and 0 < p < 1 else None
    if kept is None:
        return original(input, p, training, inplace)  # type: ignore[no-any-return]
    return _scaled(input, kept.view(*kept.shape, *[1] * (input.dim() - kept.dim())), p)


_of_channels = partial(_dropout, dims=2)


def _alpha(
    original: Callable[..., Any],
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    kept = _mask(input.shape, p, input.device) if training and 0 < p < 1 else None
    if kept is None:
        return original(input, p, training, inplace)  # type: ignore[no-any-return]
    share = 1 - _rounded(p) / _LEVELS
    scale = 1 / math.sqrt(share * (1 + (1 - share) * _ALPHA**2))
    dropped = torch.where(kept, input, torch.full_like(input, _ALPHA))
    return scale * (dropped - (1 - share) * _ALPHA)


def _attention(
    original: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """With dropout, attention is computed in parts, as torch does on CPUs."""
    if not dropout_p:
        return original(  # type: ignore[no-any-return]
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        repeats = query.size(-3) // key.size(-3)
        key, value = (one.repeat_interleave(repeats, -3) for one in (key, value))
    weights = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.size(-1)))
    if is_causal:
        attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        weights = (
            weights.masked_fill(~attn_mask, -math.inf)
            if attn_mask.dtype == torch.bool
            else weights + attn_mask
        )
    return _dropout(_torch["dropout"], weights.softmax(-1), dropout_p) @ value


def _rounded(p: float) -> int:
    """How many of the levels are dropped."""
    return min(_LEVELS - 1, max(1, round(p * _LEVELS)))


def _scaled(values: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    return values * kept * (_LEVELS / (_LEVELS - _rounded(p)))


def _mask(shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor | None:
    """Which values are kept; None if the first dimension is not of samples.

    Several rows of the first dimension may belong to a sample, such as heads of attention.
    """
    import numpy as np

    now = _now()
    call = now.call()  # numbered even without a mask: numbers must not depend on the samples
    if not shape or not shape[0] or shape[0] % now.samples:
        return None
    each = math.prod(shape) // now.samples
    blocks = -(-each // _BLOCK)
    key, first = (now.seed << 20 | call, now.step), now.begin * blocks
    if device.type == "cpu":
        generator = np.random.Philox(key=key)
        generator.advance(first)
        drawn = generator.random_raw(4 * blocks * now.samples).view(np.uint16)
        values = drawn.reshape(now.samples, _BLOCK * blocks)[:, :each]
        return torch.from_numpy(values >= _rounded(p)).view(tuple(shape))
    words = philox(key, first, blocks * now.samples, device)
    rows = words.view(now.samples, 4 * blocks)
    return at_least(rows, _rounded(p))[:, :each].reshape(tuple(shape))


def at_least(words: torch.Tensor, least: int) -> torch.Tensor:
    """Which unsigned 16 bits of int64 words, (rows, words), are `least` or more; changes the words.

    torch compares signed numbers: the order is the same if each highest bit is flipped.
    """
    return words.bitwise_xor_(_SIGN_BITS).view(torch.int16).ge(least - _LEVELS // 2)


def philox(key: tuple[int, int], first: int, blocks: int, device: torch.device) -> torch.Tensor:
    """The words that numpy's Philox gives from block `first` on, made on a device.

    int64, (4 × blocks,), with the bits of numpy's uint64.
    """
    # numpy counts before it makes a block.
    counts = torch.arange(first + 1, first + 1 + blocks, device=device)
    words: list[torch.Tensor | int] = [counts, 0, 0, 0]
    for turn in range(10):
        first_key, second_key = (
            _signed(one + turn * step) for one, step in zip(key, _PHILOX_STEPS, strict=True)
        )
        (high, low), (other_high, other_low) = (
            _product(word, factor)
            for word, factor in zip((words[0], words[2]), _PHILOX_FACTORS, strict=True)
        )
        # The high words are new: they can be changed in place.
        other_high ^= words[1]
        other_high ^= first_key
        high ^= words[3]
        high ^= second_key
        words = [other_high, other_low, high, low]
    return torch.stack([torch.as_tensor(one) for one in words], dim=1).flatten()


_PHILOX_FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_PHILOX_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_HALF, _ALL = (1 << 32) - 1, (1 << 64) - 1
_SIGN_BITS = -0x7FFF7FFF7FFF8000
"""The highest bit of each 16 bits of an int64."""


def _signed(number: int) -> int:
    """The low 64 bits as torch's int64 has them."""
    number &= _ALL
    return number - (1 << 64) if number >> 63 else number


def _product(word: torch.Tensor | int, factor: int) -> tuple[Any, Any]:
    """The high and the low 64 bits of an unsigned product; a word may be the same everywhere.

    With w = h · 2³² + l, and f − 2⁶⁴ = F · 2³² + g where g is in [−2³¹, 2³¹),

        w · f = w · 2⁶⁴ + h · F · 2⁶⁴ + (h · g + l · F) · 2³² + l · g

    whose parts fit into signed 64 bits, so that shifts need no masks. Fewest passes over memory:
    each is a kernel on a GPU.
    """
    if isinstance(word, int):
        whole = (word & _ALL) * factor
        return _signed(whole >> 64), _signed(whole)
    small = (factor + (1 << 31) & _HALF) - (1 << 31)
    large = (factor - small >> 32) - (1 << 32)
    low, high = word & _HALF, (word >> 32).bitwise_and_(_HALF)
    middle = (low * small).bitwise_right_shift_(32).add_(high, alpha=small)
    top = middle >> 32
    middle.bitwise_and_(_HALF).add_(low, alpha=large).bitwise_right_shift_(32)
    return top.add_(middle).add_(high, alpha=large).add_(word), word * _signed(factor)
