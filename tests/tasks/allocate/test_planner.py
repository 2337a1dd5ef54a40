"""The planner: the objective, on the devices that the job may use."""

from __future__ import annotations

from typing import Any

import pytest
from plans import DATA, MANY, TWO, curve, plan

from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool


def test_unlike_devices_get_shares_in_proportion_to_their_speed() -> None:
    result = plan(TWO, devices={"min_count": 2}, train={"global_batch_size": 96})
    assert [device.batch_size for device in result.devices] in ([65, 31], [64, 32])
    assert result.global_batch_size == 96
    assert result.steps_per_epoch == 11


def test_the_fastest_plan_uses_all_devices_and_the_most_economical_one_does_not() -> None:
    fixed: dict[str, Any] = {"train": {"global_batch_size": 1000}}
    fast = plan(MANY, objective={"minimize": "time"}, **fixed)
    frugal = plan(MANY, objective={"minimize": "energy"}, **fixed)
    assert len(fast.devices) == 8
    assert len(frugal.devices) < 8
    assert fast.predicted is not None
    assert frugal.predicted is not None
    assert fast.predicted.duration_s.median < frugal.predicted.duration_s.median
    assert fast.predicted.energy_j is not None
    assert frugal.predicted.energy_j is not None
    assert frugal.predicted.energy_j.median < fast.predicted.energy_j.median


def test_ranks_of_a_host_share_its_memory() -> None:
    fixed: dict[str, Any] = {"train": {"global_batch_size": 96}}
    assert len(plan(TWO, memory=1e9, **fixed).devices) == 2
    both = 2 * 1.25 * 1e8 + 1.25e6 * 96
    together = plan(TWO, memory=0.99 * both, **fixed, devices={"min_count": 2})
    assert together.accumulation > 1
    with pytest.raises(Infeasible, match="which its ranks share"):
        plan(TWO, memory=0.65 * both, **fixed, devices={"min_count": 2})
    assert len(plan(TWO, memory=0.65 * both, **fixed).devices) == 1


def test_a_cost_is_unknown_if_a_part_is_unknown() -> None:
    dark = {
        "hosts": [{"name": "a", "devices": [{"type": "cpu", "cores": 1.0}]}],
        "prices": {"energy": "0.3/kWh"},
    }
    chosen = Pool.model_validate({"name": "p", **dark})
    unknown = curve(1.0).model_copy(update={"idle_w": None, "load_w": None, "energy_source": None})
    job = Job.model_validate(
        {
            "name": "j",
            "data": {"uri": "builtin:digits"},
            "objective": {"minimize": "time", "budget": 5.0},
        }
    )
    made = Estimate(mode="calibrated", gradient_bytes=1e6, curves=[unknown])
    with pytest.raises(BadInput, match="budget: got 5; the cost is not known: pool p"):
        make_plan(job, chosen, made, DATA)


def test_a_batch_larger_than_the_memory_is_split_into_micro_batches() -> None:
    one = {"hosts": [{"name": "a", "devices": [{"type": "cpu", "cores": 1.0}]}]}
    fixed: dict[str, Any] = {"train": {"global_batch_size": 512}}
    small = [curve(1.0, memory=4e8)]
    with pytest.raises(Infeasible, match="memory binds"):
        plan(one, curves=small, most=1, **fixed)
    result = plan(one, curves=small, most=16, **fixed)
    assert result.accumulation == 3  # 171 samples at most
    assert result.devices[0].peak_memory_bytes <= 4e8
    assert result.devices[0].step_time_s.median == pytest.approx(
        2 * small[0].step_time(171).median + small[0].step_time(170).median
    )
    assert result.predicted is not None
    step_s = result.predicted.step_time_s.median
    assert result.devices[0].step_time_s.median < step_s * (1 + 1e-9)
    assert plan(one, curves=[curve(1.0)], most=16, **fixed).accumulation == 1


def test_a_noise_scale_penalises_large_batches() -> None:
    sizes = [
        plan(MANY, train={"batch_bounds": [16, 1000], "noise_scale": noise}).global_batch_size
        for noise in (1.0, 100.0, 1e6)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    rule = plan(MANY, train={"batch_bounds": [16, 1000], "noise_scale": 100.0}).batch_rule
    assert rule is not None
    assert "samples to the same loss" in rule
