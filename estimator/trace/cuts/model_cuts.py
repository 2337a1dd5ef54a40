"""Where a model can be cut into stages, and what each part between two cuts does. Loads torch.

`cut` records the model's forward pass in training and in evaluation, at several batch sizes, and
cuts it between calls of layers, where few bytes cross. Extraction and every rank of a pipeline do
this from the same source, and get the same units.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch  # noqa: TID253 - this is a separate process
from torch import nn  # noqa: TID253
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: TID253

from trainwright.estimator.curves import Affine
from trainwright.estimator.errors import BadInput
from trainwright.estimator.memory.recompute_names import is_inside
from trainwright.estimator.precision import autocast
from trainwright.estimator.structure import Unit
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.cuts.batch_sizes import Differs, common_path, joined
from trainwright.estimator.trace.cuts.call_recorder import CallRecorder, PassFailed
from trainwright.estimator.trace.cuts.forward_graph import ForwardGraph
from trainwright.estimator.trace.cuts.known_calls import attributes_of, described_module
from trainwright.estimator.trace.fake_models import RealConstants, quiet_initialisers
from trainwright.estimator.trace.source import described
from trainwright.estimator.trace.training_step import TrainingStepSpec, default_dtype, example

_SIZES = (2, 3, 257)
"""Numbers of samples of the recordings; large ones show limits such as min(samples, 100)."""
_REAL_SIZES = (2, 3, 5)


@dataclass(frozen=True)
class CutModel:
    """A model's forward pass, and the places where it can be cut.

    `graphs`: of passes in training (True) and in evaluation (False). `begins`: for each, the first
    call of each unit, then the number of calls. Without units, `not_cut` says why.
    """

    graphs: dict[bool, ForwardGraph]
    begins: dict[bool, tuple[int, ...]]
    units: tuple[Unit, ...]
    not_cut: str = ""
    is_fake: bool = True
    """whether fake tensors were enough to record it: none took memory"""

    def is_inside_call(self, module: str) -> bool:
        """Whether a module runs only inside others, which are called as a whole."""
        called = {one for unit in self.units for one in unit.modules}
        return not any(is_inside(one, module) for one in called)


def cut_step(
    what: TrainingStepSpec, device: str = "cpu", *, half: torch.dtype = torch.bfloat16
) -> CutModel:
    """The units of the model of a step, as its passes run on a device. `half`: as `autocast`."""

    def on_device() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if device == "cpu" else torch.device(device)

    def build() -> nn.Module:
        with on_device():
            return model_source.build(what.definition, what.config)

    def batch(size: int) -> Any:
        with on_device():
            return example(what, size)[0]

    with default_dtype(what.precision):
        kind = torch.device(device).type
        return cut(build, batch, lambda: autocast(what.precision, kind, half=half))


class _NotCut(Exception):
    """Why a model can't be cut."""


def cut(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> CutModel:
    """The model's units. `build` makes the model, `batch(size)` inputs, `mode` is that of a pass.

    Both are called with fake tensors; if that fails, with real ones. Generators of random numbers
    are left as they were.
    """
    with torch.random.fork_rng():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return _recorded(build, batch, mode, fake=True)
        except _NotCut as error:
            return CutModel({}, {}, (), str(error))
        except (PassFailed, BadInput):  # as of a model that reads values
            pass
        try:
            return replace(_recorded(build, batch, mode, fake=False), is_fake=False)
        except (_NotCut, PassFailed, BadInput) as error:
            return CutModel({}, {}, (), str(error))


def _recorded(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    mode: Callable[[], contextlib.AbstractContextManager[Any]],
    *,
    fake: bool,
) -> CutModel:
    sizes = _SIZES if fake else _REAL_SIZES
    of_mode = {True: sizes, False: (sizes[0], sizes[-1])}
    model = _built(build, fake=fake)
    inputs = {size: batch(size) for size in sizes}
    attributes = attributes_of(model)
    whole: dict[str, str] = {}
    while True:
        try:
            graphs = {
                training: _pass(
                    model,
                    training,
                    {one: inputs[one] for one in of_mode[training]},
                    attributes,
                    whole,
                    mode,
                )
                for training in (True, False)
            }
            _same_layers(graphs)
            break
        except Differs as error:
            name = error.path[-1]
            found = {name: f"{described_module(model, name)} {error.what}"}
        except _Troubles as error:
            found = error.found
        if "" in found:
            raise _NotCut(found[""])
        whole |= found
    return _cut(graphs, whole)


def _built(build: Callable[[], nn.Module], *, fake: bool) -> nn.Module:
    with contextlib.ExitStack() as stack:
        if fake:
            stack.enter_context(quiet_initialisers())
            stack.enter_context(RealConstants())
        try:
            return build()
        except Exception as error:
            raise PassFailed(f"building it raised {described(error)}") from error


class _Troubles(Exception):
    """Modules whose code can't be repeated call by call, and why."""

    def __init__(self, found: dict[str, str]) -> None:
        super().__init__()
        self.found = found


def _pass(
    model: nn.Module,
    training: bool,
    inputs: dict[int, Any],
    attributes: dict[int, str],
    whole: dict[str, str],
    mode: Callable[[], contextlib.AbstractContextManager[Any]],
) -> ForwardGraph:
    """A pass at any number of samples. Raises _Troubles and Differs."""
    graphs = []
    for each in inputs.values():
        model.train(training)
        with torch.set_grad_enabled(training), mode():
            recorder = CallRecorder(model, attributes, whole)
            graphs.append(recorder.run(each))
        if recorder.troubles:
            raise _Troubles(recorder.troubles)
    return joined(graphs, list(inputs))


def _same_layers(graphs: dict[bool, ForwardGraph]) -> None:
    """Raises Differs unless training and evaluation call the same layers with parameters."""
    training, evaluation = (
        [graphs[one].calls[place] for place in _layers(graphs[one])] for one in (True, False)
    )
    what = "runs other layers in training than in evaluation"
    for pair in zip(training, evaluation, strict=False):
        if pair[0].target != pair[1].target:
            raise Differs(common_path(pair), what)
    if len(training) != len(evaluation):
        raise Differs(("",), what)


def _targets(graph: ForwardGraph) -> list[Any]:
    return [one.target for one in graph.calls]


def _layers(graph: ForwardGraph) -> list[int]:
    """The calls of modules that use parameters."""
    return [
        number
        for number, call in enumerate(graph.calls)
        if call.kind == "module" and call.parameters
    ]


def _cut(graphs: dict[bool, ForwardGraph], whole: dict[str, str]) -> CutModel:
    graph = graphs[True]
    begins = {training: [0] for training in graphs}
    alike = _targets(graph) == _targets(graphs[False])
    places = {training: _places(one) for training, one in graphs.items()}
    crossing = [_crossing_bytes(graph, size) for size in _SIZES[:2]]
    for trained, evaluated in zip(places[True], places[False], strict=True):
        found = [one for one in trained if not alike or one in evaluated]
        if found and evaluated:
            best = min(reversed(found), key=lambda place: crossing[1][place])
            begins[True].append(best)
            begins[False].append(best if alike else evaluated[-1])
    for training, one in graphs.items():
        begins[training].append(len(one.calls))
    if len(begins[True]) < 3:
        raise _NotCut(
            next(iter(whole.values()), "it has no two layers between which it could be cut")
        )
    units = _units(graph, begins[True], crossing)
    return CutModel(graphs, {key: tuple(one) for key, one in begins.items()}, tuple(units))


def _places(graph: ForwardGraph) -> list[list[int]]:
    """For each two layers in turn, the calls between them before which the model can be cut."""
    forbidden = set(_forbidden(graph))
    return [
        [one for one in range(layer + 1, following + 1) if one not in forbidden]
        for layer, following in itertools.pairwise(_layers(graph))
    ]


def _units(
    graph: ForwardGraph, begins: Sequence[int], crossing: Sequence[Sequence[float]]
) -> list[Unit]:
    """The units. `crossing`: the bytes that cross before each call, for two numbers of samples."""
    units: list[Unit] = []
    known: set[str] = set()
    for begin, end in itertools.pairwise(begins):
        calls = graph.calls[begin:end]
        modules = list(dict.fromkeys(one.target for one in calls if one.kind == "module"))
        per_sample = crossing[1][end] - crossing[0][end] if end < len(graph.calls) else 0
        fixed = crossing[0][end] - _SIZES[0] * per_sample if end < len(graph.calls) else 0
        units.append(
            Unit(
                name=_unit_name(modules, known),
                modules=modules,
                crossing_bytes=Affine(fixed=max(0.0, fixed), per_sample=per_sample),
                dropouts=sum(one.dropouts for one in calls),
                batch_statistics=any(one.batch_statistics for one in calls),
            )
        )
        known.add(units[-1].name)
    return units


def _unit_name(modules: Sequence[str], known: set[str]) -> str:
    """The first module that names no earlier unit; if there is none, the first with a number."""
    others = (f"{modules[0]}:{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain(modules, others) if one not in known)


def _crossing_bytes(graph: ForwardGraph, size: int) -> list[float]:
    """By call: the bytes that cross if the model is cut before it."""
    steps = [0.0] * (len(graph.calls) + 2)
    for ref, last in graph.last_uses.items():
        if graph.facts[ref].shape is not None:
            steps[ref.call + 1] += graph.facts[ref].bytes_of(size)
            steps[last + 1] -= graph.facts[ref].bytes_of(size)
    total, found = 0.0, []
    for one in steps:
        total += one
        found.append(total)
    return found


def _forbidden(graph: ForwardGraph) -> Iterator[int]:
    """The calls before which the model can't be cut.

    What a call changes in place, and what it leaves behind in a module, must be where it was made
    and where it is used.
    """
    made: dict[int, int] = {}
    touched: dict[str, list[int]] = {}
    changed = {name for call in graph.calls for name in call.changes}
    for ref, facts in graph.facts.items():
        made[facts.storage] = min(ref.call, made.get(facts.storage, ref.call))
        if facts.shape is None:
            yield from range(ref.call + 1, graph.last_uses.get(ref, ref.call) + 1)
    for number, call in enumerate(graph.calls):
        for storage in call.mutates:
            yield from range(made.get(storage, 0) + 1, number + 1)
        for name in changed & (call.reads | call.changes):
            touched.setdefault(name, []).append(number)
        for needed in call.needs:
            yield from range(needed + 1, number + 1)
    for places in touched.values():
        yield from range(places[0] + 1, places[-1] + 1)
