"""Ranks send as many bytes as their layout's actions say, in every precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_ranks import ThreadExchange, structure_of, train_in_threads, with_layout
from training_case import request

from trainwright.tasks.allocate.actions.action import TRANSFERS
from trainwright.tasks.allocate.actions.actions import actions_of
from trainwright.tasks.allocate.actions.transfer_sizes import TransferSizes
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline
from trainwright.tasks.train.exchange.transfers import MessageKey, PendingTransfer, Transfers
from trainwright.tasks.train.rank.rank import Rank

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 24)
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.LayerNorm(108 + 24)
        self.middle = nn.Linear(108 + 24, 20, bias=False)
        self.table = nn.Embedding(17, 6)
        self.last = nn.Linear(26, 10)

    def forward(self, images):
        pixels = images.flatten(1)
        first = self.first(pixels)
        seen = torch.cat([first, self.conv(images).flatten(1)], dim=1)
        tokens = pixels[:, 20].round().long().clamp(0, 16)
        found = torch.relu(self.middle(self.norm(seen)))
        return self.last(torch.cat([found, self.table(tokens)], dim=1))


def build_model():
    return Net()
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "summed": {"sync": {}, "chunk_bytes": 1000},
    "late": {"sync": {"first": "factors", "middle": "factors", "table": "factors"}},
    "late in bf16": {"sync": {"middle": "factors"}, "factor_type": "bf16"},
    "rows": {
        "sync": {"first": "rows", "middle": "rows", "last": "factors"},
        "rows": {"first": [10, 0, 14], "middle": [9, 5, 6]},
    },
}


class CountedTransfers(Transfers):
    """Counts what its messages contain, without their headers."""

    counted: Counter[str]

    def send(
        self,
        transfer: PendingTransfer,
        sends: Mapping[int, Sequence[torch.Tensor]],
        keys: Sequence[MessageKey],
    ) -> None:
        for tensors in sends.values():
            self.counted[transfer.name] += sum(one.nbytes for one in tensors)
        super().send(transfer, sends, keys)


@pytest.mark.parametrize("precision", ["fp32", "fp64", "amp", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_send_what_was_predicted(tmp_path: Path, precision: str, layout: str) -> None:
    asked = request(tmp_path, [17, 9, 5], validation_fraction=1500 / 1797, precision=precision)
    (Path(asked.source_folder) / "net.py").write_text(MODEL)
    asked = asked.model_copy(update={"plan": asked.plan.model_copy(update={"accumulation": 2})})
    asked = with_layout(asked, **LAYOUTS[layout])
    before: dict[int, Counter[str]] = {}

    def counted(rank: Rank) -> Counter[str]:
        """The bytes of sums, in this rank's tensors, and of messages that it sent."""
        exchange = rank.collective
        assert isinstance(exchange, ThreadExchange)
        assert isinstance(exchange.transfers, CountedTransfers)
        return exchange.summed_bytes + exchange.transfers.counted

    def count(rank: Rank, step: int) -> None:
        transfers = rank.collective.transfers
        assert transfers is not None
        if step == 0:
            transfers.__class__ = CountedTransfers
            transfers.counted = Counter()  # type: ignore[attr-defined]
        else:
            before[rank.number] = counted(rank)

    found = train_in_threads(
        asked, tmp_path / "store", lambda rank: None, most_steps=2, before=count
    )
    assert found == [None] * 3
    own = asked.plan.layout
    assert own is not None
    planned = own.model_copy(
        update={
            "pipelines": [
                Pipeline(micro_batches=parts, stages=one.stages)
                for parts, one in zip(([9, 8], [5, 4], [3, 2]), own.pipelines, strict=True)
            ]
        }
    )
    layers = [one.facts() for one in structure_of(asked).layer_work]
    for rank, sent in before.items():
        assert by_transfer(sent) == predicted(planned, layers, rank)


def by_transfer(counted: Counter[str]) -> dict[str, float]:
    """By name; sums of gradients together."""
    found = Counter[str]()
    for name, size in counted.items():
        if name.startswith("gradients."):
            found["sum"] += size
        elif name != "figures" and not name.startswith("sum of"):  # messages of sums
            found[name.partition(" ")[2]] += size  # without gather, exchange, ...
    return {name: float(size) for name, size in found.items() if size}


def predicted(layout: Layout, layers: Sequence[Any], rank: int) -> dict[str, float]:
    """As `by_transfer`."""
    sizes, found = TransferSizes(layout, layers), {"sum": 0.0}
    for action in actions_of(layout, layers)[rank]:
        if action.kind not in TRANSFERS or action.kind == "agree":
            continue
        moved = sizes.of(action)
        if action.chunk is not None:
            found["sum"] += moved.ring_bytes
        elif size := float(moved.sent_bytes(3)[rank]):
            found[action.name] = size
    return found
