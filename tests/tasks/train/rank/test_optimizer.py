from __future__ import annotations

import pytest
import torch

from trainwright.tasks.spec.job import Optimizer
from trainwright.tasks.train.rank.optimizer import learning_rate_at, make_optimizer


def test_the_constant_schedule_stays_and_the_cosine_falls_from_the_base_to_zero() -> None:
    assert {learning_rate_at(step, 10, 0.3, "constant") for step in range(10)} == {0.3}
    cosine = [learning_rate_at(step, 10, 0.3, "cosine") for step in range(10)]
    assert cosine[0] == pytest.approx(0.3)
    assert cosine[5] == pytest.approx(0.15)
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[-1] > 0


@pytest.mark.parametrize(
    ("name", "kind", "momentum"),
    [
        ("sgd", torch.optim.SGD, 0),
        ("momentum", torch.optim.SGD, 0.8),
        ("adam", torch.optim.Adam, None),
        ("adamw", torch.optim.AdamW, None),
    ],
)
def test_the_job_sets_the_optimizer_and_its_constants(
    name: str, kind: type, momentum: float | None
) -> None:
    spec = Optimizer.model_validate({"name": name, "weight_decay": 0.02, "momentum": 0.8})
    found = make_optimizer([torch.nn.Parameter(torch.ones(2))], spec, 0.1)
    assert type(found) is kind
    assert (found.defaults["lr"], found.defaults["weight_decay"]) == (0.1, 0.02)
    assert found.defaults.get("momentum") == momentum
