"""Learning from whole steps. Their operations cost other times than when they are timed alone."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np

from trainwright.estimator.fit.cost_fit import fit_families
from trainwright.estimator.fit.roofline_fit import DevicePrior
from trainwright.estimator.fit.whole_steps import WholeSteps
from trainwright.estimator.predict.op_cost import FamilyCost, OpSample, Roofline, times
from trainwright.estimator.predict.step_work import FamilyWork, by_family

PRIOR = DevicePrior("cpu")
TRUTH = Roofline(latency_s=2e-6, flops_per_s=1e11, bytes_per_s=1e10)
SLOWER = 1.3  # of one kind of operation, within a step


def _op(kind: str, flops: float, count: int) -> OpSample:
    return OpSample(
        kind=kind,
        family="matmul",
        dtype="float32",
        flops=flops,
        bytes=flops / 50,
        dims={"rows": flops / 1e3},
        count=count,
        seconds=float(TRUTH(flops, flops / 50)),
    )


def _steps(count: int) -> list[list[OpSample]]:
    draw = random.Random(1)
    kinds = ("aten.mm", "aten.bmm")
    return [
        [_op(draw.choice(kinds), 10 ** draw.uniform(4, 8), draw.randint(1, 5)) for _ in range(6)]
        for _ in range(count)
    ]


def _work(ops: list[OpSample]) -> dict[str, FamilyWork]:
    return by_family(
        [(one.family, one.kind, one.count, one.flops, one.bytes, one.dims) for one in ops]
    )


def _predicted(costs: Mapping[str, FamilyCost], ops: list[OpSample]) -> float:
    return sum(float(times(costs, family, each)[0].sum()) for family, each in _work(ops).items())


def _took(ops: list[OpSample]) -> float:
    return sum(one.count * one.seconds * (SLOWER if one.kind == "aten.bmm" else 1.0) for one in ops)


def _taught(steps: list[list[OpSample]], disturbed: int = 0) -> dict[str, FamilyCost]:
    """Costs from single operations, then from whole steps; `disturbed` ones are 3 times slower."""
    costs = fit_families([op for step in steps for op in step], PRIOR)
    learning = WholeSteps(costs)
    rows, off = [], []
    for number, step in enumerate(steps):
        predicted = _predicted(costs, step)
        work = _work(step)
        rows.append(
            learning.row(
                work,
                {
                    family: times(costs, family, each)[0] / predicted
                    for family, each in work.items()
                },
            )
        )
        off.append(math.log((3 if number < disturbed else 1) * _took(step) / predicted))
    return learning.taught(learning.learn(np.array(rows), np.array(off), np.full(len(steps), 0.02)))


def _errors(costs: Mapping[str, FamilyCost], steps: list[list[OpSample]]) -> np.ndarray:
    return np.array([abs(_predicted(costs, one) / _took(one) - 1) for one in steps])


def test_costs_within_steps_are_learned_for_unseen_steps() -> None:
    made = _steps(80)
    seen, unseen = made[:60], made[60:]
    alone = fit_families([op for step in seen for op in step], PRIOR)
    assert np.median(_errors(alone, unseen)) > 0.08
    assert np.median(_errors(_taught(seen), unseen)) < 0.04


def test_disturbed_steps_hardly_count() -> None:
    made = _steps(80)
    assert np.median(_errors(_taught(made[:60], disturbed=6), made[60:])) < 0.06


def test_families_that_occur_in_no_step_keep_their_costs() -> None:
    steps = _steps(30)
    other = _op("aten.exp", 0.0, 1).model_copy(update={"family": "elementwise", "bytes": 1e5})
    costs = fit_families(
        [*(op for step in steps for op in step), *(other for _ in range(3))], PRIOR
    )
    learning = WholeSteps(costs)
    work = _work(steps[0])
    row = learning.row(work, {family: np.ones(len(each.kinds)) for family, each in work.items()})
    found = learning.taught(learning.learn(row[None], np.array([0.2]), np.array([0.0])))
    assert found["elementwise"] == costs["elementwise"]
    assert found["matmul"] != costs["matmul"]
