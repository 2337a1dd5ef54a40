"""The largest batch of each device of a plan that fits in its memory."""

from __future__ import annotations

from collections import defaultdict

from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.kinds import largest_batch
from trainwright.tasks.allocate.plan.topology import machine_of


def most_samples(chosen: Configuration, bound: int) -> dict[str, int | None]:
    """Samples per step that fit in each device's memory, by device id, at most `bound`.

    None if the device's memory is unknown. Ranks that share a machine's memory grow in proportion
    to their current need.
    """
    model = chosen.topology.model
    shares = [(device, batch, model.kind(device)) for device, batch in chosen.devices()]
    needs = {
        device.id: model.memory_bytes(kind, batch, chosen.accumulation)
        for device, batch, kind in shares
    }
    shared: dict[str, float] = defaultdict(float)
    for device, _, kind in shares:
        if kind.shares_memory:
            shared[machine_of(device)] += needs[device.id]
    found: dict[str, int | None] = {}
    for device, batch, kind in shares:
        limit = kind.curve.memory_limit_bytes
        if limit is None:
            found[device.id] = None
            continue
        if kind.shares_memory:
            limit *= needs[device.id] / shared[machine_of(device)]
        curve = kind.curve.model_copy(update={"memory_limit_bytes": limit})
        micro = largest_batch(curve, bound, model.kept_bytes(chosen.accumulation))
        found[device.id] = max(batch, min(bound, chosen.accumulation * micro))
    return found
