"""Says a plan in one sentence."""

from __future__ import annotations

from collections import Counter

from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.units import counted, plain, seconds

_SIZES_SHOWN = 6


def plan_sentence(plan: Plan) -> str:
    """`2 CPUs, 66 + 30 samples, about 15 s, at most 28 s (90 %); deadline 30 min`."""
    kinds = Counter(one.type for one in plan.devices)
    parts = [", ".join(_of_kind(count, kind) for kind, count in kinds.items())]
    sizes = [one.batch_size for one in plan.devices]
    each = len(sizes) <= _SIZES_SHOWN and sum(sizes) == plan.global_batch_size
    samples = " + ".join(map(str, sizes)) if each else str(plan.global_batch_size)
    parts.append(f"{samples} samples{micro(plan.accumulation)}")
    if plan.layout is not None and plan.layout.name != DATA_PARALLEL:
        parts.append(plan.layout.name)
    if plan.predicted is not None:
        parts.append(f"about {seconds(plan.predicted.duration_s.median)}")
    if (most := plan.not_exceeded) is not None and most.duration_s is not None:
        sure = f"{plain(100 * most.confidence, 4)} %"
        parts.append(f"at most {seconds(most.duration_s)} ({sure})")
    limits = [] if plan.deadline_s is None else [f"deadline {seconds(plan.deadline_s)}"]
    if plan.queue_wait is not None:
        limits.insert(0, plan.queue_wait.in_words)
    if plan.budget is not None:
        limits.append(f"budget {plain(plan.budget)} {plan.currency or 'units'}")
    return "; ".join([", ".join(parts), *limits])


def _of_kind(count: int, kind: str) -> str:
    return counted(count, "CPU") if kind == "cpu" else f"{count} x {kind}"


def micro(accumulation: int) -> str:
    """How a batch is accumulated, for a text about it; empty: it is not."""
    return f" in {accumulation} micro-batches" if accumulation > 1 else ""
