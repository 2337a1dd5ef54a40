from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from trainwright.tasks.spec.train_spec import Optimizer
from trainwright.tasks.train.rank.optimizer import learning_rate_at, make_optimizer


def test_the_constant_schedule_stays_and_the_cosine_falls_from_the_base_to_zero() -> None:
    assert {learning_rate_at(step, 10, 0.3, "constant") for step in range(10)} == {0.3}
    cosine = [learning_rate_at(step, 10, 0.3, "cosine") for step in range(10)]
    assert cosine[0] == pytest.approx(0.3)
    assert cosine[5] == pytest.approx(0.15)
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[-1] > 0


def test_flat_cosine_stays_for_half_of_the_run_and_falls_to_zero() -> None:
    rates = [learning_rate_at(step, 20, 0.3, "flat-cosine") for step in range(21)]
    assert set(rates[:11]) == {0.3}
    assert rates[15] == pytest.approx(0.15)
    assert rates[20] == pytest.approx(0)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "flat-cosine"])
def test_a_warm_up_rises_from_a_tenth_to_the_schedules_rate(schedule: str) -> None:
    plain = [learning_rate_at(step, 20, 0.3, schedule) for step in range(20)]
    warm = [learning_rate_at(step, 20, 0.3, schedule, 0.2) for step in range(20)]
    shares = [one / other for one, other in zip(warm, plain, strict=True)]
    assert shares[:4] == pytest.approx([0.1, 0.325, 0.55, 0.775])
    assert shares[4:] == [1] * 16


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_job_sets_betas(name: str) -> None:
    spec = Optimizer.model_validate({"name": name, "betas": [0.8, 0.95]})
    found = make_optimizer([torch.nn.Parameter(torch.ones(2))], spec, 0.1)
    assert found.defaults["betas"] == (0.8, 0.95)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_vectors_can_be_left_out_of_weight_decay(name: str) -> None:
    matrix, vector, scalar = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), ()))
    values = {"name": name, "weight_decay": 0.5, "decay_exclude": "vectors"}
    spec = Optimizer.model_validate(values)
    found = make_optimizer([vector, matrix, scalar], spec, 0.1)
    decays = {
        id(one): group["weight_decay"] for group in found.param_groups for one in group["params"]
    }
    assert decays == {id(matrix): 0.5, id(vector): 0.0, id(scalar): 0.0}
    [only] = make_optimizer([vector], spec, 0.1).param_groups
    assert only["weight_decay"] == 0


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
    assert isinstance(found, kind)
    assert (found.defaults["lr"], found.defaults["weight_decay"]) == (0.1, 0.02)
    assert found.defaults.get("momentum") == momentum


def test_a_rank_loads_neither_torchs_compiler_nor_the_ledgers_database() -> None:
    code = """
import sys, torch
import trainwright.tasks.train.worker.member
from trainwright.tasks.spec.train_spec import Optimizer
from trainwright.tasks.train.rank.optimizer import make_optimizer
weight = torch.nn.Parameter(torch.ones(2))
for name in ("sgd", "momentum", "adam", "adamw"):
    made = make_optimizer([weight], Optimizer(name=name), 0.1)
    made.zero_grad()
    weight.sum().backward()
    made.step()
    made.load_state_dict(made.state_dict())
print([name for name in ("torch._dynamo", "sqlalchemy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
