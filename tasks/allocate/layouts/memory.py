"""The memory that a layout needs on each device, beside that of data parallel. Arithmetic.

A device that holds some rows of a layer saves the others: parameters, gradients and the optimizer's
tensors. It keeps the inputs and output gradients of the joint batch until the end of the step. So
does a device that late-multiplies a layer, for all its rows. A checkpoint is put together in the
host's memory, which the estimate of a rank contains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.estimator.structure import DenseProduct, LayerFacts
from trainwright.tasks.allocate.layouts.actions import FLOAT_BYTES
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.topology import machine_of
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.spec.train_spec import Optimizer

_INDEX_BYTES = 8
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors that an optimizer keeps for each parameter."""


def state_tensors(optimizer: Optimizer) -> int:
    """Tensors of a parameter's size that a rank holds: itself, gradient, optimizer's state."""
    return 2 + MOMENTS[optimizer.name]


@dataclass(frozen=True)
class Shortage:
    """A device whose memory a layout exceeds."""

    device: str
    need_bytes: float
    limit_bytes: float
    layer: str
    """the layer that takes most of it"""

    @property
    def over_bytes(self) -> float:
        """How much is missing."""
        return self.need_bytes - self.limit_bytes

    def __str__(self) -> str:
        need, have = self.need_bytes / 2**30, self.limit_bytes / 2**30
        return f"{self.device} needs {need:.3g} GiB and has {have:.3g}; most is for {self.layer}"


class LayoutMemory:
    """The memory of layouts on the devices of a configuration."""

    def __init__(self, result: Configuration, layers: Sequence[LayerFacts]) -> None:
        import numpy as np

        model = result.topology.model
        self._layers: Mapping[str, LayerFacts] = {one.name: one for one in layers}
        self._tensors = state_tensors(model.job.train.optimizer)
        devices = result.devices()
        self._devices = [device.id for device, _ in devices]
        self._samples = np.array([float(batch) for _, batch in devices])
        kinds = [model.kind(device) for device, _ in devices]
        self._summed = np.array(
            [
                model.memory_bytes(kind, batch, result.accumulation)
                for kind, (_, batch) in zip(kinds, devices, strict=True)
            ]
        )
        """bytes of each device under data parallel"""
        self._pools: list[tuple[list[int], float]] = []
        """devices that share a memory, and its bytes"""
        shared: dict[tuple[str, float], list[int]] = defaultdict(list)
        for number, ((device, _), kind) in enumerate(zip(devices, kinds, strict=True)):
            limit = kind.curve.memory_limit_bytes
            if limit is None:
                continue
            if kind.shares_memory:
                shared[machine_of(device), limit].append(number)
            else:
                self._pools.append(([number], limit))
        self._pools += [(members, limit) for (_, limit), members in shared.items()]

    def needs(self, layout: Layout) -> Any:
        """Bytes of each device: a numpy array."""
        return self._summed + sum(self._by_layer(layout).values())

    def shortage(self, layout: Layout) -> Shortage | None:
        """The device whose memory lacks most; None if the layout fits on all."""
        if not self._pools:
            return None
        added = self._by_layer(layout)
        needs = self._summed + sum(added.values())
        worst: Shortage | None = None
        for members, limit in self._pools:
            if (need := float(needs[members].sum())) <= limit:
                continue
            most = max(members, key=lambda number: float(needs[number]))
            one = Shortage(self._devices[most], need, limit, self._largest(layout, added, most))
            if worst is None or one.over_bytes > worst.over_bytes:
                worst = one
        return worst

    def row_shares(self, layout: Layout, speeds: Sequence[float]) -> list[float]:
        """The share of all sharded rows that each device holds: by speed, as far as memory allows.

        `layout` has the sharded layers; its rows do not matter.
        """
        import numpy as np

        wanted = np.array(speeds) / sum(speeds)
        rows = [self._layers[name] for name, how in layout.sync.items() if how == "rows"]
        whole = self._tensors * sum(one.parameter_bytes for one in rows)
        if not self._pools or not whole:
            return [float(one) for one in wanted]
        none = {one.name: dict.fromkeys(self._devices, (0, 0)) for one in rows}
        least = self.needs(layout.model_copy(update={"rows": none}))
        most = np.full(len(wanted), np.inf)
        for members, limit in self._pools:
            room = max(0.0, limit - float(least[members].sum()))
            most[members] = room / len(members) / whole
        return _filled(wanted, most)

    def _by_layer(self, layout: Layout) -> dict[str, Any]:
        """Bytes of each device by layer, beyond data parallel: numpy arrays."""
        found = {}
        for name, layer in self._layers.items():
            how = layout.how(name)
            if how == "average":
                copies = 1 + (layout.outer != "none")
                found[name] = copies * layer.parameter_bytes + 0 * self._samples
            elif layer.dense is not None and how == "factors":
                found[name] = self._factors(layer.dense, layout.factor_type)
            elif layer.dense is not None and how == "rows":
                found[name] = self._rows(layer, layer.dense, layout)
        return found

    def _factors(self, dense: DenseProduct, factor_type: str) -> Any:
        own = self._samples * dense.rows_per_sample
        size = FLOAT_BYTES if factor_type == "fp32" else 2
        inputs = _INDEX_BYTES if dense.kind == "embedding" else size * dense.inputs
        # Its own in fp32, those of all as they came, and both joined for the product.
        return own * FLOAT_BYTES * dense.outputs + 2 * own.sum() * (inputs + size * dense.outputs)

    def _rows(self, layer: LayerFacts, dense: DenseProduct, layout: Layout) -> Any:
        import numpy as np

        cuts = [layout.rows[layer.name].get(device, (0, 0)) for device in self._devices]
        total = dense.inputs if dense.kind == "embedding" else dense.outputs
        share = np.array([end - begin for begin, end in cuts]) / total
        joint = float(self._samples.sum()) * dense.rows_per_sample
        inputs = _INDEX_BYTES if dense.kind == "embedding" else FLOAT_BYTES * dense.inputs
        kept = joint * (inputs + share * FLOAT_BYTES * dense.outputs)
        return kept - (1 - share) * self._tensors * layer.parameter_bytes

    def _largest(self, layout: Layout, added: Mapping[str, Any], device: int) -> str:
        """The layer that takes most of a device's memory."""

        def size(layer: LayerFacts) -> float:
            more = float(added[layer.name][device]) if layer.name in added else 0.0
            return self._tensors * layer.parameter_bytes + more

        return max((one for one in self._layers.values() if one.parameters), key=size).name


def _filled(wanted: Any, most: Any) -> list[float]:
    """Shares that sum to 1, as near to the wanted ones as their upper limits allow."""
    import numpy as np

    found, full = wanted.copy(), np.zeros(len(wanted), dtype=bool)
    for _ in range(len(wanted)):
        over = ~full & (found > most)
        if not over.any():
            break
        full |= over
        found[full] = most[full]
        left, free = 1 - float(found[full].sum()), wanted * ~full
        if left <= 0 or not free.sum():
            break
        found = np.where(full, found, free / free.sum() * left)
    return [float(one) for one in found / found.sum()] if found.sum() else [*map(float, wanted)]
