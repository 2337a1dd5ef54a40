"""The planner chooses the size of gradient chunks by simulated steps."""

from __future__ import annotations

from layout_cases import LOSS, convolution, dense_layer
from layout_plans import plan, step_s

from trainwright.tasks.runs.artefacts.layout import CHUNK_BYTES

BODY = [convolution(f"conv{number}", 300_000) for number in range(16)]


def test_small_chunks_leave_less_to_send_after_the_backward_pass() -> None:
    chosen = plan([*BODY, LOSS], layout="data-parallel", global_batch_size=640)
    fixed = plan(
        [*BODY, LOSS], layout={"dense": "sum", "chunk_bytes": CHUNK_BYTES}, global_batch_size=640
    )
    assert chosen.layout is not None
    assert chosen.layout.chunk_bytes < CHUNK_BYTES
    assert step_s(chosen) < 0.98 * step_s(fixed)


def test_chunks_are_of_the_fixed_size_if_others_are_about_as_good() -> None:
    # The last layer has nearly all gradients: the rest is sent while the backward pass goes on.
    body = [convolution(f"conv{number}", 1000) for number in range(16)]
    chosen = plan([*body, dense_layer("fc", 2048, 4096), LOSS], layout="data-parallel")
    assert chosen.layout is not None
    assert chosen.layout.chunk_bytes == CHUNK_BYTES


def test_the_jobs_chunk_size_stays_and_on_one_machine_nothing_is_compared() -> None:
    given = plan([*BODY, LOSS], layout={"dense": "sum", "chunk_bytes": 3 << 20}).layout
    alone = plan([*BODY, LOSS], hosts=70, global_batch_size=700, layout="data-parallel").layout
    assert given is not None
    assert given.chunk_bytes == 3 << 20
    assert alone is not None
    assert alone.chunk_bytes == CHUNK_BYTES
