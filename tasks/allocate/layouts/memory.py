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
from trainwright.tasks.allocate.actions.number_sizes import (
    INDEX_BYTES,
    activation_number_bytes,
    gradient_number_bytes,
)
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.topology import machine_of
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.spec.train_spec import Optimizer

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
    stage: str = ""
    """of a pipeline: the units that it computes"""
    process_bytes: float = 0.0
    """what its process takes without any layer"""
    sharing: int = 1
    """ranks of its machine that share the memory"""
    together: bool = False
    """whether the figures are of all ranks that share it, else of this device's part"""

    @property
    def over_bytes(self) -> float:
        """How much is missing."""
        return self.need_bytes - self.limit_bytes

    def __str__(self) -> str:
        need, have = self.need_bytes / 2**30, self.limit_bytes / 2**30
        holds = f" for {self.stage}" if self.stage else ""
        most = f"most is for {self.layer}"
        if self.process_bytes >= self.limit_bytes:
            most = f"its process alone takes {self.process_bytes / 2**30:.3g}"
        if self.sharing == 1:
            return f"{self.device} needs {need:.3g} GiB{holds} and has {have:.3g}; {most}"
        if self.together:
            who = f"{self.sharing} ranks on the machine of {self.device}"
            return f"{who} need {need:.3g} GiB together and have {have:.3g}; {most}"
        part = f"its part of the {self.sharing * have:.3g} that {self.sharing} ranks share"
        return f"{self.device} needs {need:.3g} GiB{holds} and has {have:.3g}, {part}; {most}"

    @property
    def details(self) -> dict[str, object]:
        """Fields for programs."""
        return {
            "device": self.device,
            "needed_bytes": round(self.need_bytes),
            "memory_bytes": round(self.limit_bytes),
        }


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
            largest = self._largest(layout, added, most)
            one = Shortage(
                self._devices[most], need, limit, largest, sharing=len(members), together=True
            )
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
                own, whole = self._samples, self._samples.sum()
                found[name] = factors_bytes(layer, own, whole, layout.factor_type)
            elif layer.dense is not None and how == "rows":
                found[name] = self._rows(layer, layer.dense, layout)
        return found

    def _rows(self, layer: LayerFacts, dense: DenseProduct, layout: Layout) -> Any:
        import numpy as np

        cuts = [layout.rows[layer.name].get(device, (0, 0)) for device in self._devices]
        total = dense.inputs if dense.kind == "embedding" else dense.outputs
        share = np.array([end - begin for begin, end in cuts]) / total
        return rows_bytes(layer, share, float(self._samples.sum()), self._tensors)

    def _largest(self, layout: Layout, added: Mapping[str, Any], device: int) -> str:
        """The layer that takes most of a device's memory."""

        def size(layer: LayerFacts) -> float:
            more = float(added[layer.name][device]) if layer.name in added else 0.0
            return self._tensors * layer.parameter_bytes + more

        return max((one for one in self._layers.values() if one.parameters), key=size).name


def factors_bytes(layer: LayerFacts, own: Any, whole: float, factor_type: str) -> Any:
    """What a device needs more to late-multiply a dense layer than to sum its gradients.

    `own` and `whole` are the samples of the device and of all that hold the layer.
    """
    dense = layer.dense
    assert dense is not None, layer.name
    exact = gradient_number_bytes(layer)
    size = exact if factor_type == "fp32" else 2
    inputs = INDEX_BYTES if dense.kind == "embedding" else size * dense.inputs
    # Its own as they are summed, those of all as they came, and both joined for the product.
    of_sample = own * exact * dense.outputs + 2 * whole * (inputs + size * dense.outputs)
    return dense.rows_per_sample * of_sample


def rows_bytes(layer: LayerFacts, share: Any, whole: float, tensors: int) -> Any:
    """What a device needs more (or less) to hold a share of a dense layer's rows than all.

    `whole` are the samples of all that hold some, `tensors` those of a parameter's size.
    """
    dense = layer.dense
    assert dense is not None, layer.name
    size = activation_number_bytes(layer)
    inputs = INDEX_BYTES if dense.kind == "embedding" else size * dense.inputs
    kept = whole * dense.rows_per_sample * (inputs + share * size * dense.outputs)
    return kept - (1 - share) * tensors * layer.parameter_bytes


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
