"""A training step as a GPU runs it, from one traced with a CPU's operations. Loads no torch.

A GPU runs two parts of a step with far fewer calls than a CPU:

- PyTorch's optimizers update all parameters with one call of each kind (their `foreach` is the
  default on CUDA, see torch.optim.Adam); on a CPU each parameter has calls of its own.
- cuDNN runs a recurrent layer with one call in each direction; on a CPU a GRU or RNN has a dozen
  calls for each token. (A CPU's LSTM is one call for each layer already.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import Calls, LayerWork, Operation, Structure

_RECURRENT = ("GRU", "RNN")
_RUN, _GRADIENT = "aten._cudnn_rnn", "aten._cudnn_rnn_backward"
_OVER_LISTS = {"aten.div": "aten._foreach_div_"}  # the others have the name of the single call
_NOTHING = Affine(fixed=0.0, per_sample=0.0)


def step_on_gpu(structure: Structure) -> Structure:
    """The structure with the calls that a GPU makes: the same FLOPs and parameters.

    Its memory's lifetimes are left out. Unchanged if the structure doesn't say which layer makes
    which call.
    """
    if not structure.layer_work:
        return structure
    trace, layers = list(structure.trace), list[LayerWork]()
    updates = Counter({place: one.count for place, one in enumerate(trace)})
    for layer in structure.layer_work:
        for calls in (layer.forward, layer.input_gradient, layer.weight_gradient):
            updates.subtract(dict(calls))
        if layer.kind in _RECURRENT and (fused := _fused(layer, structure)):
            trace.extend(fused)
            run, gradient = len(trace) - 2, len(trace) - 1
            fused_calls = {
                "forward": ((run, 1.0),),
                "input_gradient": ((gradient, 0.5),),
                "weight_gradient": ((gradient, 0.5),),
            }
            layers.append(layer.model_copy(update=fused_calls))
        else:
            layers.append(layer)
    of_layers = Counter[int]()
    for layer in layers:
        for calls in (layer.forward, layer.input_gradient, layer.weight_gradient):
            of_layers.update(dict(calls))
    kept = {place: round(count) for place, count in of_layers.items() if round(count) > 0}
    places = {place: number for number, place in enumerate(sorted(kept))}
    found = [trace[place].model_copy(update={"count": kept[place]}) for place in sorted(kept)]
    found += _updates(
        [(trace[place], round(count)) for place, count in updates.items() if round(count) > 0]
    )

    def moved(calls: Calls) -> Calls:
        return tuple((places[place], count) for place, count in calls if place in places)

    work = [
        layer.model_copy(
            update={
                "forward": moved(layer.forward),
                "input_gradient": moved(layer.input_gradient),
                "weight_gradient": moved(layer.weight_gradient),
            }
        )
        for layer in layers
    ]
    return structure.model_copy(update={"trace": found, "layer_work": work, "lifetimes": None})


def _updates(calls: Sequence[tuple[Operation, int]]) -> list[Operation]:
    """One call for all of a kind: the optimizer's, over all parameters.

    Sizes are as calibration records them: of the largest tensor, and of no result in place.
    """
    groups: dict[tuple[str, str, str], list[tuple[Operation, int]]] = {}
    for one, count in calls:
        if one.family != "view":  # a view of one tensor; one call for all tensors needs none
            groups.setdefault((one.kind, one.family, one.dtype), []).append((one, count))
    found = []
    for (kind, family, _), members in groups.items():
        if len(members) == members[0][1] == 1 or family != "elementwise":
            found += [one.model_copy(update={"count": times}) for one, times in members]
            continue
        name = _OVER_LISTS.get(kind, f"aten._foreach_{kind.removeprefix('aten.')}")
        largest = max((one for one, _ in members), key=lambda one: one.bytes.fixed)
        tensors = _sum((one.dims.get("tensors", _NOTHING), times) for one, times in members)
        made = {"made": _NOTHING} if name.endswith("_") else {}
        found.append(
            largest.model_copy(
                update={
                    "kind": name,
                    "count": 1,
                    "flops": _sum((one.flops, times) for one, times in members),
                    "bytes": _sum((one.bytes, times) for one, times in members),
                    "dims": {**largest.dims, "tensors": tensors, **made},
                }
            )
        )
    return found


def _fused(layer: LayerWork, structure: Structure) -> tuple[Operation, Operation] | None:
    """cuDNN's call for a recurrent layer, and that of its gradient; None: not as expected.

    The product that runs most often multiplies the hidden state, at each token. The bytes are those
    of its parameters and results, each once.
    """
    trace = structure.trace
    forward = [(trace[place], n) for place, n in layer.forward if trace[place].family == "matmul"]
    gradient = [
        (trace[place], n)
        for place, n in (*layer.input_gradient, *layer.weight_gradient)
        if trace[place].family == "matmul"
    ]
    by_count = sorted(forward, key=lambda one: one[1])
    if len(by_count) < 2 or not {"rows", "inner"} <= by_count[-1][0].dims.keys():
        return None
    step, whole = by_count[-1][0], by_count[0][0]
    size = structure.batch_size
    tokens = whole.dims["rows"](size) / max(1.0, step.dims["rows"](size))
    dims = {
        "steps": Affine(fixed=tokens, per_sample=0.0),
        "batch": step.dims["rows"],
        "inputs": whole.dims["inner"],
        "hidden": step.dims["inner"],
    }
    moved = Affine(
        fixed=layer.parameter_bytes + layer.output_bytes.fixed,
        per_sample=layer.output_bytes.per_sample,
    )
    alike = {"family": "rnn", "count": 1, "layout": {}}
    return (
        step.model_copy(
            update={
                **alike,
                "kind": _RUN,
                "flops": _sum((one.flops, count) for one, count in forward),
                "bytes": moved,
                "dims": {**dims, "backward": _NOTHING},
            }
        ),
        step.model_copy(
            update={
                **alike,
                "kind": _GRADIENT,
                "flops": _sum((one.flops, count) for one, count in gradient),
                "bytes": _sum([(moved, 2)]),
                "dims": {**dims, "backward": Affine(fixed=1.0, per_sample=0.0)},
            }
        ),
    )


def _sum(lines: Iterable[tuple[Affine, float]]) -> Affine:
    each = list(lines)
    return Affine(
        fixed=sum(count * line.fixed for line, count in each),
        per_sample=sum(count * line.per_sample for line, count in each),
    )
