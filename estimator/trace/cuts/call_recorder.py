"""Records the calls that the code of a model's forward pass makes. Loads torch.

The pass runs natively, as a rule with fake tensors. Modules whose code is simple are opened: the
calls of functions and modules in their code are recorded. Other modules are run whole, as one call.
What can't be repeated call by call is a `trouble` of the module whose code does it: it is run whole
in the next recording.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch  # noqa: TID253 - recording runs in a separate process
from torch import nn  # noqa: TID253
from torch.overrides import TorchFunctionMode  # noqa: TID253

from trainwright.estimator.trace.cuts import known_calls
from trainwright.estimator.trace.cuts.call_notes import (
    CallNotes,
    line,
    modes,
    owner,
    random_state,
    storage,
    version,
)
from trainwright.estimator.trace.cuts.forward_graph import (
    INPUTS,
    AttributeRef,
    CallKind,
    ForwardCall,
    ForwardGraph,
    TensorRef,
    TreeTemplate,
    tensors_in,
)
from trainwright.estimator.trace.cuts.seen_tensors import SeenTensors
from trainwright.estimator.trace.cuts.torch_patches import patches
from trainwright.estimator.trace.source import described


class PassFailed(Exception):
    """The model's code raised an exception."""


class CallRecorder(TorchFunctionMode):
    """One forward pass. `whole`: the modules that are run whole; `attributes`: `attributes_of`."""

    def __init__(
        self, model: nn.Module, attributes: Mapping[int, str], whole: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.troubles: dict[str, str] = {}
        """by module: what its code does that can't be repeated call by call"""
        self._model, self._modules = model, dict(model.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._attributes, self._whole = attributes, whole
        self._trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._calls: list[ForwardCall] = []
        self._seen = SeenTensors()
        self._path: list[str] = []
        self._own: CallNotes | None = None
        self._looking = False
        self._random: Any = None
        self._gradients, self._modes = torch.is_grad_enabled(), modes()

    def run(self, inputs: Any) -> ForwardGraph:
        """Record the model's pass over these inputs. Raises PassFailed."""
        template = TreeTemplate.of(inputs, self._input)
        self._random = random_state()
        with contextlib.ExitStack() as stack:
            for one in (*patches(self), self):
                stack.enter_context(one)
            try:
                outputs = self._model(inputs)
            except Exception as error:
                raise PassFailed(f"its forward pass raised {described(error)}") from error
        self._path = [""]
        result = TreeTemplate.of(outputs, self._ref)
        return ForwardGraph(self._calls, template, result, self._seen.facts)

    def _input(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return self._seen.made(leaf, TensorRef(INPUTS, len(self._seen.facts)))

    # Calls of functions.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._looking:
            return func(*args, **kwargs)
        if self._own is not None:
            return self._inner(self._own, func, args, kwargs)
        if (functional := known_calls.replaced_by(func)) is not None:
            return self.record_call("functional", functional, func, args, kwargs)
        return self.record_call("function", func, func, args, kwargs)

    def record_call(self, kind: CallKind, target: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call whose own calls are not recorded, and record it."""
        own = CallNotes(len(self._calls))
        module = self._modules[target] if kind == "module" else None
        with self._look():
            given = tensors_in((args, kwargs))
            own.given = {id(one) for one in given}
            before = [(one, version(one)) for one in given]
            if module is not None:
                self._same_random()
                self._runs(module, own)
                held = module.named_buffers(prefix=target)
                buffers = [(name, one, version(one)) for name, one in held]
        if kind == "functional":
            own.in_dropout = True
            own.dropouts += known_calls.draws_mask(target, args, kwargs)
        self._own = own
        try:
            made = func(*args, **kwargs)
        finally:
            self._own = None
        with self._look():
            if module is not None:
                self._random = random_state()
                own.changes |= {owner(name) for name, one, was in buffers if version(one) != was}
            own.changed = [one for one, was in before if version(one) != was]
            if kind == "module" or tensors_in(made) or own.changed:
                self._record(kind, target, args, kwargs, made, own)
            elif given:
                self._asked(known_calls.name_of(func), given, made)
        return made

    def _asked(self, name: str, given: list[torch.Tensor], made: Any) -> None:
        """A function of tensors made none and changed none."""
        if name in known_calls.SIZES and self._seen.any_varies(given):
            self.trouble("uses a size that depends on values")
        if name in known_calls.QUERIES or self._seen.are_constant(given):
            return
        self.trouble(
            f"uses {name.strip('_')}() of a tensor: what follows depends on its values"
            if isinstance(made, bool | int | float | list | str)
            else f"calls {name.strip('_')}(), which can't be repeated alone"
        )

    def _inner(self, own: CallNotes, func: Any, args: Any, kwargs: Any) -> Any:
        """A call inside another."""
        name = known_calls.name_of(func)
        with self._look():
            own.batch_statistics |= known_calls.of_batch(name, args, kwargs)
            for one in tensors_in((args, kwargs)):
                self._uses(one, own)
        slow = known_calls.is_slow_fake(name, args)
        made = known_calls.one_time(func, args) if slow else func(*args, **kwargs)
        with self._look():
            for one in tensors_in(made):
                self._seen.made_inside(one, own.number)
        return made

    def _uses(self, tensor: torch.Tensor, own: CallNotes) -> None:
        """A call uses a tensor that may be none of its arguments."""
        key = id(tensor)
        if (path := self._attributes.get(key)) is not None:
            self._holds(path, own)
        elif key in own.given:
            return
        elif (maker := self._seen.inside.get(key)) is not None:
            own.needs |= {maker} - {own.number}
        elif (ref := self._seen.refs.get(key)) is not None:
            own.needs.add(ref.call)

    def _holds(self, path: str, own: CallNotes) -> None:
        if path in self._trained:
            own.parameters.add(path)
        else:
            own.reads.add(owner(path))

    def count_dropout(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a dropout inside a call, and count it."""
        own = self._own
        if own is None or own.in_dropout:
            return func(*args, **kwargs)
        # torch passes it on to `__torch_function__`, and so back to here.
        own.in_dropout = True
        own.dropouts += known_calls.draws_mask(name, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            own.in_dropout = False

    def _record(
        self, kind: CallKind, target: Any, args: Any, kwargs: Any, made: Any, own: CallNotes
    ) -> None:
        if modes() != self._modes:
            self.trouble("computes in a mode of its own, such as autocast")
        if torch.is_grad_enabled() and not self._gradients:
            self.trouble("records gradients in evaluation")
        name = known_calls.name_of(target) if kind == "function" else ""
        if name in known_calls.OF_GRADIENTS:
            self.trouble(f"calls {name}() in its forward pass")
        own.batch_statistics |= known_calls.of_batch(name, args, kwargs)
        own.mutates = {storage(one) for one in own.changed if id(one) in self._seen.refs}
        self._seen.mutated(own.mutates)
        given = tensors_in((args, kwargs))
        for one in given:
            if (path := self._attributes.get(id(one))) is not None:
                self._holds(path, own)
                if any(one is each for each in own.changed):
                    own.changes.add(owner(path))
        arguments = tuple(TreeTemplate.of(one, self._ref) for one in args)
        named = {key: TreeTemplate.of(one, self._ref) for key, one in kwargs.items()}
        self._seen.derive(name, args, kwargs, given, tensors_in(made))
        places = itertools.count()
        self._calls.append(
            ForwardCall(
                kind,
                target,
                arguments,
                named,
                TreeTemplate.of(made, lambda leaf: self._result(leaf, own.number, places)),
                torch.is_grad_enabled(),
                tuple(self._path),
                frozenset(own.parameters),
                frozenset(own.reads),
                frozenset(own.changes),
                frozenset(own.mutates),
                frozenset(own.needs),
                dropouts=own.dropouts,
                batch_statistics=own.batch_statistics,
            )
        )

    def _result(self, leaf: Any, number: int, places: Iterator[int]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if isinstance(leaf, known_calls.PLAIN) else None
        return self._seen.made(leaf, TensorRef(number, next(places)))

    def _ref(self, leaf: Any) -> Any:
        """What stands for a value in the recording."""
        if not isinstance(leaf, torch.Tensor):
            if not (isinstance(leaf, known_calls.PLAIN) or known_calls.is_plain_function(leaf)):
                self.trouble(f"passes on a {type(leaf).__name__}")
            return leaf
        key = id(leaf)
        if (ref := self._seen.refs.get(key)) is not None:
            if self._seen.has_unseen_node(leaf):
                self.trouble("calls an autograd.Function in a way that can't be seen")
            return ref
        path = self._attributes.get(key)
        if path is None:
            maker = self._seen.inside.get(key)
            self.trouble(
                "uses a tensor that comes neither from its inputs nor from a module"
                if maker is None
                else f"uses a tensor that {self._calls[maker].target} keeps"
            )
        return AttributeRef(path or "")

    # Calls of modules.

    def follows(self) -> bool:
        """Whether opened code runs, whose calls are recorded."""
        return not self._looking and self._own is None

    def module_call(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module, opened or as one call."""
        name = self._names.get(module)
        if name is None or not self.follows():
            return call(module, *args, **kwargs)
        if not name and not self._path:
            if known_calls.has_hooks(module):
                self._path = [""]
                self.trouble("has hooks, which need the whole pass")
        elif (
            name in self._whole
            or name in self._path
            or known_calls.runs_whole(module, args, kwargs)
        ):
            return self.record_call(
                "module", name, lambda *a, **k: call(module, *a, **k), args, kwargs
            )
        self._same_random()
        self._path.append(name)
        try:
            made = call(module, *args, **kwargs)
            self._same_random()
        finally:
            self._path.pop()
        return made

    def _runs(self, module: nn.Module, own: CallNotes) -> None:
        """A call runs a module whole, with all that it holds."""
        own.parameters |= {
            path
            for one in module.parameters()
            if (path := self._attributes.get(id(one))) is not None
        }
        for each in module.modules():
            name = self._names.get(each, "")
            own.reads.add(name)
            if isinstance(each, known_calls.NORMS):
                of_batch = each.training or not each.track_running_stats
                own.batch_statistics |= of_batch and isinstance(each, known_calls.BATCH_NORM)
                if each.training and each.track_running_stats:
                    own.changes.add(name)

    def attribute_set(self, module: nn.Module) -> None:
        """An attribute of a module was set."""
        name = self._names.get(module)
        if name is None or self._looking:
            return
        if self._own is not None:
            self._own.changes.add(name)
        else:
            self.trouble("sets an attribute of a module")

    def mask_read(self, mask: torch.Tensor | None, read: Callable[[], bool]) -> bool:
        """The code of torch's transformers reads whether a mask is causal.

        This is a constant if the mask is one, or is held by a module.
        """
        if self.follows() and mask is not None and not self._seen.are_constant([mask]):
            path = self._attributes.get(id(mask))
            if path is None or path in self._trained:
                self.trouble("has a mask that depends on its inputs")
        with self._look():
            return read()

    # Checks.

    def trouble(self, what: str) -> None:
        """The code of the innermost opened module does what can't be repeated call by call."""
        name = self._path[-1]
        if name not in self.troubles:
            self.troubles[name] = (
                f"{known_calls.described_module(self._model, name)} {what}{line()}"
            )

    def _same_random(self) -> None:
        """Random numbers of Python or numpy decide what opened code does: it is run whole."""
        now = random_state()
        if now != self._random and self._path:
            self.trouble("draws random numbers of Python or numpy")
        self._random = now

    @contextlib.contextmanager
    def _look(self) -> Iterator[None]:
        """Look at tensors without recording it."""
        before, self._looking = self._looking, True
        try:
            yield
        finally:
            self._looking = before
