"""Plans know which sums the backward pass can hide, by where the gradients are made."""

from __future__ import annotations

import pytest
from layout_cases import LOSS, convolution
from layout_plans import plan, plan_and_estimate, step_s

from trainwright.tasks.allocate.plan.overlap import BACKWARD, overlap_of

SMALL = [convolution(f"conv{number}", 1000) for number in range(16)]
LARGE = convolution("large", 2_000_000)


@pytest.mark.parametrize(("hosts", "network"), [(2, "200Mbit"), (70, "10Gbit")])
def test_gradients_that_are_complete_at_the_end_are_not_hidden(hosts: int, network: str) -> None:
    # With 70 hosts, layouts are not simulated.
    early = plan([*SMALL, LARGE, LOSS], network, hosts, global_batch_size=700)
    late = plan([LARGE, *SMALL, LOSS], network, hosts, global_batch_size=700)
    assert step_s(early) < 0.9 * step_s(late)


def test_the_share_that_hides_sums_lies_between_nothing_and_the_backward_pass() -> None:
    def share(layers: list) -> float:  # type: ignore[type-arg]
        estimate = plan_and_estimate(layers)[1]
        return overlap_of(estimate.layers, estimate.curves)

    early, late = share([*SMALL, LARGE, LOSS]), share([LARGE, *SMALL, LOSS])
    assert 0 <= late < 0.05 < early <= BACKWARD
    assert overlap_of([], []) == BACKWARD
