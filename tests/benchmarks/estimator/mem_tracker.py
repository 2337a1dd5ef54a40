"""A step's memory by torch: `MemTracker` of torch.distributed._tools, used as documented."""

from __future__ import annotations

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves
from zoo import Case


def peak_bytes(case: Case) -> float:
    """Peak bytes of live tensors in the second of two real steps."""
    step = case.step()
    batch = [one for one in tree_leaves(step.micro_batches) if isinstance(one, torch.Tensor)]
    tracker = MemTracker()
    tracker.track_external(step.model, step.optimizer, *batch)
    with tracker:
        step()
        tracker.reset_mod_stats()
        step()
    return float(sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values()))
