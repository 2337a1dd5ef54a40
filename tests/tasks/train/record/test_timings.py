"""Each rank's step time is compute, waiting or communication; the slowest rank does not wait."""

from __future__ import annotations

import io
import math
import mmap

import pyarrow.parquet as pq
import pytest
import torch

from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.training_result import GroupAverage, SplitEvent
from trainwright.tasks.train.checkpoint.files import CheckpointState
from trainwright.tasks.train.record.metrics import NOT_MEASURED, common_parts, encode
from trainwright.tasks.train.record.timings import Figures, memory_bytes


class Place:
    """A collective with three ranks; the test sets its time in sums."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank, self.wait_s = rank, 0.0

    def sum_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        raise AssertionError("the figures must be part of the step's own sum")

    start_sum = finish = shutdown = sum_  # type: ignore[assignment]


@pytest.mark.parametrize("in_sums_s", [0.0, 150.0, 30000.0])
def test_ranks_share_their_figures_and_split_their_time_in_sums(in_sums_s: float) -> None:
    places = [Place(rank) for rank in range(3)]
    ranks = [Figures(place, torch.device("cpu"), None) for place in places]  # type: ignore[arg-type]
    for place, figures in zip(places, ranks, strict=True):
        figures.begin()
        place.wait_s -= 100.0 * place.rank  # as if it had computed for that much longer
    summed = sum(figures.arrive(0.1 * rank) for rank, figures in enumerate(ranks))
    assert isinstance(summed, torch.Tensor)
    for place, figures in zip(places, ranks, strict=True):
        place.wait_s = in_sums_s
        figures.finish(summed.tolist())
    busy_s = [one.busy_s for one in ranks[0].all]
    assert busy_s[0] < busy_s[1] < busy_s[2]
    for rank, figures in enumerate(ranks):
        own = figures.own
        assert own.wait_s == min(max(busy_s) - busy_s[rank], in_sums_s)
        assert own.wait_s + own.communication_s == pytest.approx(in_sums_s)
        assert [one.compute_s for one in figures.all] == [0.0, 0.1, 0.2]
        assert math.isnan(own.energy_j)
    assert ranks[2].own.wait_s == 0


def test_memory_bytes_counts_the_memory_of_the_process() -> None:
    before = memory_bytes(torch.device("cpu"))
    held = mmap.mmap(-1, 2**26)  # not from the allocator, which may reuse freed memory
    for _ in range(64):
        held.write(bytes(2**20))
    assert 0.9 * len(held) < memory_bytes(torch.device("cpu")) - before < 1.5 * len(held)


def test_figures_that_nothing_measures_are_nulls_of_type_double() -> None:
    table = pq.read_table(io.BytesIO(encode([{"step": 0, **NOT_MEASURED}])))
    assert str(table.schema.field("energy_j").type) == "double"
    assert table.column("energy_j").to_pylist() == [None]


def test_split_events_of_every_kind_become_rows() -> None:
    events = [
        SplitEvent(
            step=5, batch_sizes=[60, 0], reason="lost", averaged=GroupAverage(by=[0], after=0)
        ),
        SplitEvent(
            step=9,
            batch_sizes=[40, 20],
            reason="back",
            layout=Layout(name="data-parallel", pipelines=[]),
            averaged=GroupAverage(by=[0], after=1, unfinished={0: 2}),
        ),
    ]
    state = CheckpointState(9, 0, [40, 20], events=[one.model_dump(mode="json") for one in events])
    for event, (name, rows) in zip(events, common_parts(state, 0), strict=True):
        assert name == f"splits-{event.step:08d}"
        row = pq.read_table(io.BytesIO(encode(rows))).to_pylist()[0]
        assert row["batch_sizes"] == event.batch_sizes
        assert row["layout"] == (event.layout and event.layout.name)
