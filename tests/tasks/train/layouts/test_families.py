"""Unmodified models train as in one process when three ranks divide their layers.

Every family does so in the compositions of pipelines (`test_compositions.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from families import source_of
from joint_batch_case import BOUNDS, relative_difference
from layout_ranks import layers_of, train_in_threads, with_layout
from test_exactness import state
from training_case import alone, request

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.layouts.permitted import why_not
from trainwright.tasks.runs.artefacts.layout import Sync
from trainwright.tasks.train.rank.rank import Rank


def alternating(layers: list[LayerFacts]) -> tuple[dict[str, Sync], dict[str, list[int]]]:
    """Dense layers late-multiplied and sharded in turn, in uneven rows of three ranks."""
    sync: dict[str, Sync] = {}
    rows: dict[str, list[int]] = {}
    for one in layers:
        if not one.parameters or why_not(one, "factors"):
            continue
        late = len(sync) % 2 == 0 or why_not(one, "rows") is not None
        sync[one.name] = "factors" if late else "rows"
        if not late:
            dense = one.dense
            assert dense is not None
            total = dense.inputs if dense.kind == "embedding" else dense.outputs
            rows[one.name] = [total // 2, total // 3, total - total // 2 - total // 3]
    return sync, rows


@pytest.mark.parametrize(
    "family",
    [
        "convolutions with norms",
        "LSTM",
        "transformer",
        "tied embedding",
        "shared layer, used twice",
    ],
)
def test_an_unmodified_model_trains_as_in_one_process(tmp_path: Path, family: str) -> None:
    asked = request(
        tmp_path,
        [31, 20, 11],  # the last batch of an epoch is smaller
        validation_fraction=1500 / 1797,
        epochs=3,
        precision="fp64",
        optimizer={"name": "momentum"},
        clip_norm=5.0,
    )
    (Path(asked.source_folder) / "net.py").write_text(source_of(family))

    def evaluate(rank: Rank, step: int) -> None:
        if step == 7:  # all ranks at once, between two steps
            rank.validate()

    divided = with_layout(asked, *alternating(layers_of(asked)))
    found = train_in_threads(divided, tmp_path / "store", state, before=evaluate)
    expected = alone(asked)
    for one in found:
        assert relative_difference(one, expected) <= BOUNDS["fp64"]
