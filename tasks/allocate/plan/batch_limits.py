"""How far the batch of a plan's devices may grow: what their memory holds."""

from __future__ import annotations

from collections import defaultdict

from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.cost import largest_batch
from trainwright.tasks.allocate.plan.placement import machine_of


def most_samples(chosen: Configuration, bound: int) -> dict[str, int | None]:
    """Samples a step that each device's memory holds, by id, at most `bound`; None where its memory is not known.

    Ranks that share a machine's memory may all grow in the proportion of what they need now.
    """
    model = chosen.layout.model
    shares = [(device, batch, model.kind(device)) for device, batch in chosen.devices()]
    needs = {
        device.id: model.memory_bytes(kind, batch, chosen.accumulation)
        for device, batch, kind in shares
    }
    beside: dict[str, float] = defaultdict(float)
    for device, _, kind in shares:
        if kind.shares_memory:
            beside[machine_of(device)] += needs[device.id]
    found: dict[str, int | None] = {}
    for device, batch, kind in shares:
        limit = kind.curve.memory_limit_bytes
        if limit is None:
            found[device.id] = None
            continue
        if kind.shares_memory:
            limit *= needs[device.id] / beside[machine_of(device)]
        curve = kind.curve.model_copy(update={"memory_limit_bytes": limit})
        found[device.id] = max(batch, largest_batch(curve, bound))
    return found
