"""What each layer does in a step, from recordings at a batch size and its double. Loads torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trainwright.estimator.curves import Affine
from trainwright.estimator.structure import DenseProduct, LayerWork
from trainwright.estimator.trace.layer_tracker import LOSS
from trainwright.estimator.trace.recorder import LayerSeen, Recording
from trainwright.estimator.trace.two_sizes import line


def layer_work(
    model: Any, first: Recording, second: Recording, micro_batch: int, ran: list[int]
) -> list[LayerWork]:
    """The layers in the order in which they first compute.

    `micro_batch` is the number of samples of a forward pass in `first`; `ran` gives the index in
    the trace for each operation of `first`.
    """
    counts: dict[str, dict[str, Counter[int]]] = {}
    for place, group in zip(first.places, ran, strict=True):
        if place.phase == "update":
            continue
        phases = counts.setdefault(
            place.layer, {name: Counter() for name in ("forward", "input", "weight")}
        )
        if place.phase == "forward":
            phases["forward"][group] += 1
            continue
        for name, share in (("weight", place.weight_share), ("input", 1 - place.weight_share)):
            if share:
                phases[name][group] += share  # type: ignore[assignment]
    if LOSS in counts:
        counts[LOSS] = counts.pop(LOSS)  # it is last
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    found = []
    for name, phases in counts.items():
        own = [one for one, users in first.used_by.items() if users[0] == name and one in trained]
        seen = first.layers.get(name, LayerSeen("loss"))
        found.append(
            LayerWork(
                name=name,
                kind=seen.kind,
                parameters={one: trained[one].numel() for one in own},
                parameter_bytes=float(sum(trained[one].nbytes for one in own)),
                shared=any(len(users) > 1 for users in _uses(first, name)),
                dense=_dense(seen, micro_batch),
                calls=max(1, seen.calls // max(1, first.passes)),
                output_bytes=_line(first, second, name, "output_bytes", micro_batch),
                kept_bytes=_line(first, second, name, "kept_bytes", micro_batch),
                forward=tuple(phases["forward"].items()),
                input_gradient=tuple(phases["input"].items()),
                weight_gradient=tuple(phases["weight"].items()),
            )
        )
    return found


def _uses(recording: Recording, layer: str) -> list[list[str]]:
    return [users for users in recording.used_by.values() if layer in users]


def _dense(seen: LayerSeen, micro_batch: int) -> DenseProduct | None:
    if seen.dense is None:
        return None
    kind, rows, inputs, outputs = seen.dense
    return DenseProduct(
        kind=kind,
        rows_per_sample=rows / micro_batch,
        inputs=inputs,
        outputs=outputs,
    )


def _line(first: Recording, second: Recording, layer: str, what: str, size: int) -> Affine:
    none = LayerSeen("loss")
    low, high = (getattr(one.layers.get(layer, none), what) for one in (first, second))
    return line(low, high, size)
