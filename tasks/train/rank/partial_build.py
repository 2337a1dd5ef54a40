"""Builds a model of which this process holds only some tensors, without memory for the others.

The values are those of the whole model: tensors that are not held are made on torch's `meta`
device, and whatever draws random numbers for them draws as many, one tensor at a time.

The model's code runs twice. The first time, all large tensors are on `meta`, and each operation is
noted: which tensors it makes, and from which others. The second time, only those are real that the
held tensors are computed from. Code that reads numbers of a large tensor, or that makes other calls
in its second run, builds the whole model instead: `PartialBuild.part` then drops what is not held.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch  # noqa: TID253 - only ranks import this
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: TID253
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID253
from torch.utils._pytree import tree_leaves, tree_map  # noqa: TID253

from trainwright.tasks.errors import TrainwrightError
from trainwright.tasks.train.layouts.cut_tensors import blank

LEAST_BYTES = 1 << 16
"""Smaller tensors are always made: their values may decide what else the model's code does."""
_log = logging.getLogger(__name__)


class _NotAlike(Exception):
    """The model's code can't be run without its large tensors."""


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class PartialBuild:
    """Builds parts of a model, by a function that builds the whole one."""

    def __init__(
        self, build: Callable[[], torch.nn.Module], least_bytes: int = LEAST_BYTES
    ) -> None:
        """`build` always does the same: it seeds torch itself."""
        self._build, self._least_bytes = build, least_bytes
        self._noted: _Noted | None = None
        self.is_whole = False
        """whether the last part was built as a whole model"""

    def part(self, held: Collection[str]) -> torch.nn.Module:
        """The model with the values of these parameters and buffers; others are `blank`.

        Those of no dimension are always held.
        """
        model, self.is_whole = None, False
        try:
            self._noted = self._noted or self._note()
            model = self._with(self._noted, held)
        except (_NotAlike, RuntimeError, TrainwrightError) as error:
            # An error of the model's own code comes again from the whole build.
            _log.warning("builds the whole model, to keep a part of it: %s", error)
            self.is_whole = True
        model = self._build() if model is None else model
        lacking = {
            id(one): blank(one.shape, one.dtype)
            for name, one in named_tensors(model).items()
            if one.dim() and name not in held
        }
        for module in model.modules():
            for name, one in {**module._parameters, **module._buffers}.items():
                if id(one) in lacking and one is not None:
                    lacking[id(one)] = _replace(module, name, one, lacking[id(one)])
        return model

    def _note(self) -> _Noted:
        noting = _Noting(self._least_bytes)
        with noting:
            model = self._build()
        named = named_tensors(model)
        by_name = {
            name: noting.made_by[key]
            for name, one in named.items()
            if (key := _key(one)) in noting.made_by
        }
        # Tensors that modules have beside parameters and buffers are needed in any part.
        beside = noting.alive() - {*by_name.values()}
        if beside:
            gc.collect()  # those of objects that nothing uses are not
            beside &= noting.alive()
        always = {by_name[name] for name, one in named.items() if not one.dim() and name in by_name}
        return _Noted(noting.calls, noting.sources, by_name, always | beside)

    def _with(self, noted: _Noted, held: Collection[str]) -> torch.nn.Module:
        with _Making(noted, noted.absent(held)) as making:
            model = self._build()
        if making.number != len(noted.calls):
            raise _NotAlike(f"it makes {making.number} calls of torch, then {len(noted.calls)}")
        if lacking := [
            name
            for name, one in named_tensors(model).items()
            if one.device.type == "meta" and (name in held or not one.dim())
        ]:
            raise _NotAlike(f"{lacking[0]} is made from tensors that are not held")
        return model


class _Noted:
    """What the first run of a model's code has done."""

    def __init__(
        self,
        calls: list[str],
        sources: Mapping[int, set[int]],
        by_name: Mapping[str, int],
        others: set[int],
    ) -> None:
        """`calls`: of torch, in order. `sources`: by call whose tensors were on `meta`, the calls
        that made what it, or a later change of its tensors, reads. `by_name`: the calls that made
        parameters and buffers; `others`: those whose tensors are needed in any part.
        """
        self.calls = calls
        self._sources, self._by_name, self._others = sources, by_name, others

    def absent(self, held: Collection[str]) -> set[int]:
        """The calls whose tensors nothing that is held is computed from."""
        todo = [number for name, number in self._by_name.items() if name in held]
        needed, todo = set[int](), [*todo, *self._others]
        while todo:
            number = todo.pop()
            if number not in needed:
                needed.add(number)
                todo += self._sources.get(number, ())
        return {*self._sources} - needed


class _Uncompiled(TorchDispatchMode):
    """A mode that does not load `torch.compile`, whose import is slow."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Noting(_Uncompiled):
    """Makes large tensors on `meta`, and what is computed from them; notes how."""

    def __init__(self, least_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type for it
        self._least_bytes = least_bytes
        self.calls: list[str] = []
        self.sources: dict[int, set[int]] = {}
        self.made_by: dict[int, int] = {}
        """by storage: the call that made it"""
        self._storages: dict[int, StorageWeakRef] = {}
        """of the same storages; with it, no other one gets its number"""

    def alive(self) -> set[int]:
        """The calls that made storages which a tensor still has."""
        return {self.made_by[key] for key, one in self._storages.items() if not one.expired()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, number = kwargs or {}, len(self.calls)
        self.calls.append(str(func))
        given = [*_tensors((args, kwargs))]
        if any(one.device.type == "meta" for one in given):
            found = _on_meta(func, args, kwargs)
        elif given or not _takes_device(func):
            found = tree_map(self._small, func(*args, **kwargs))
        else:
            found = func(*args, **{**kwargs, "device": "meta"})
            if not any(map(self._is_large, _tensors(found))):
                found = func(*args, **kwargs)
        read = {self.made_by[key] for one in given if (key := _key(one)) in self.made_by}
        known = {_key(one) for one in given}
        for one in _tensors(found):
            if one.device.type == "meta" and _key(one) not in known:
                self.made_by[_key(one)] = number
                self._storages[_key(one)] = StorageWeakRef(one.untyped_storage())
                self.sources.setdefault(number, set()).update(read)
        for one in _changed(func, args, kwargs):
            if (made := self.made_by.get(_key(one))) is not None:
                self.sources[made] |= read - {made}
        return found

    def _is_large(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() * tensor.element_size() >= self._least_bytes

    def _small(self, found: Any) -> Any:
        """What was made of small tensors, on `meta` if it is large."""
        if isinstance(found, torch.Tensor) and self._is_large(found):
            return _as_meta(found)
        return found


class _Making(_Uncompiled):
    """Makes the tensors of some calls on `meta`, and draws their random numbers all the same."""

    def __init__(self, noted: _Noted, absent: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type for it
        self._noted, self._absent, self.number = noted, absent, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, number = kwargs or {}, self.number
        self.number += 1
        if number >= len(self._noted.calls) or self._noted.calls[number] != str(func):
            raise _NotAlike(f"its call {number} of torch is {func} in its second run")
        given, draws = [*_tensors((args, kwargs))], torch.Tag.nondeterministic_seeded in func.tags
        if any(one.device.type == "meta" for one in given):
            if any(one.device.type != "meta" for one in _changed(func, args, kwargs)):
                raise _NotAlike(f"{func} changes a tensor that is held by one that is not")
            if draws:
                func(*tree_map(_zeros, args), **tree_map(_zeros, kwargs))
            return _on_meta(func, args, kwargs)
        if number not in self._absent:
            return func(*args, **kwargs)
        if not draws and not given and _takes_device(func):
            return func(*args, **{**kwargs, "device": "meta"})
        return tree_map(_as_meta, func(*args, **kwargs))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (one for one in tree_leaves(values) if isinstance(one, torch.Tensor))


def _changed(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _key(tensor: torch.Tensor) -> int:
    """A number of its storage, as long as that lives."""
    return int(tensor.untyped_storage()._cdata)


def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    if func is torch.ops.aten.normal_.default and args[0].device.type == "meta":
        return args[0]  # torch does the same, but loads `torch.compile` for it
    kwargs = tree_map(_as_meta, kwargs)
    if _takes_device(func) and kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    return func(*tree_map(_as_meta, args), **kwargs)


def _as_meta(value: Any) -> Any:
    """A tensor of the same form on `meta`; all else as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _zeros(value: Any) -> Any:
    """For a tensor on `meta`, one in memory; all else as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type != "meta":
        return value
    size = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    flat = torch.zeros(size if value.numel() else 0, dtype=value.dtype)
    return flat.as_strided(value.shape, value.stride())


def _replace(
    module: torch.nn.Module, name: str, tensor: torch.Tensor, by: torch.Tensor
) -> torch.Tensor:
    """Let a module have another value of a parameter or buffer. Returns the tensor that has it."""
    if tensor.device.type != "meta":
        tensor.data = by
        return by
    if isinstance(tensor, torch.nn.Parameter) and not isinstance(by, torch.nn.Parameter):
        by = torch.nn.Parameter(by, requires_grad=tensor.requires_grad)
    setattr(module, name, by)  # tied ones get the same one
    return by
