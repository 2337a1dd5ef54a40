"""Stages recompute if what they keep of micro-batches does not fit, and the plan says what."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import pytest
from plans import DATA
from recorded_models import wide_structure

from trainwright.estimator.memory.recompute_names import covered
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.tasks.allocate.layouts.permitted import require_permitted
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.recompute.recompute_words import recompute_in_words
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool

_TYPE = "nvidia-t4"


def _estimate(limit: float, **changes: Any) -> Estimate:
    structure = wide_structure()
    curve = predict_curve(structure, None, device_type=_TYPE)
    found = Estimate(
        mode="datasheet",
        gradient_bytes=float(structure.parameter_bytes),
        curves=[curve.model_copy(update={"memory_limit_bytes": limit})],
        layers=[one.facts() for one in structure.layer_work],
        units=structure.units,
        step=structure.recorded_step(),
    )
    return found.model_copy(update=changes)


def _plan(limit: float, batch: int = 256, estimate: Estimate | None = None, **layout: Any) -> Plan:
    """The plan for two GPUs of this memory, each on a host."""
    hosts = [
        {"name": name, "address": f"10.0.0.{place}", "devices": [{"type": _TYPE}]}
        for place, name in enumerate("ab", 1)
    ]
    pool = Pool.model_validate({"name": "p", "hosts": hosts})
    job = Job.model_validate(
        {
            "name": "j",
            "data": {"uri": "builtin:digits"},
            "objective": {"minimize": "time"},
            "train": {
                "global_batch_size": batch,
                "layout": {"stages": 2, "micro_batches": 4, "schedule": "gpipe", **layout},
            },
        }
    )
    return make_plan(job, pool, estimate or _estimate(limit), DATA)


def _need(plan: Plan) -> float:
    return max(one.peak_memory_bytes for one in plan.devices)


@functools.cache
def _plain() -> Plan:
    return _plan(1e13)


def _step_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s.median


def test_nothing_is_recomputed_if_stages_fit() -> None:
    layout = _plain().layout
    assert layout is not None
    assert not layout.recomputes
    assert "recompute" not in _plain().layout_in_words


@pytest.mark.parametrize("share", [0.85, 0.6])
def test_a_stage_that_does_not_fit_recomputes_some_of_its_own(share: float) -> None:
    limit = share * _need(_plain())
    with pytest.raises(Infeasible, match="memory binds"):
        _plan(limit, recompute="none")
    plan = _plan(limit)
    layout = plan.layout
    assert layout is not None
    assert layout.recomputes
    require_permitted(
        layout, plan.layers, {one.id: one.batch_size for one in plan.devices}, plan.units
    )
    order = [one.name for one in plan.layers]
    held = {unit.name: set(unit.layers) for unit in plan.units}
    for stage in layout.pipelines[0].stages:
        own = set().union(*(held[name] for name in stage.layers))
        assert covered(stage.recompute, order) <= own
    assert _need(plan) <= limit
    assert _step_s(plan) > _step_s(_plain())
    assert re.search(
        r"; [ab]/\S+: recompute blocks\.\S+.*: −\d+.* % memory, \+\d+.* % time",
        plan.layout_in_words,
    )


def test_less_memory_takes_no_less_time() -> None:
    times = [_step_s(_plan(share * _need(_plain()))) for share in (0.5, 0.7, 0.9, 1.0)]
    assert times == sorted(times, reverse=True)


def test_all_recomputes_on_any_memory() -> None:
    plan = _plan(1e13, recompute="all")
    layout = plan.layout
    assert layout is not None
    assert all(stage.recompute for stage in layout.pipelines[0].stages)
    assert _need(plan) < 0.8 * _need(_plain())


@pytest.mark.parametrize("share", [0.7, 0.9])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_the_planner_recomputes_only_what_lowers_a_peak_and_never_for_a_longer_step(
    share: float, schedule: str
) -> None:
    limit = share * _need(_plain())
    found: list[Plan] = []
    for way in ("auto", "none"):
        with contextlib.suppress(Infeasible):
            found.append(_plan(limit, schedule=schedule, recompute=way))
    plan = found[0]
    assert plan.layout is not None
    assert _need(plan) <= limit
    assert "saves no memory" not in plan.layout_in_words
    for without in found[1:]:
        assert _step_s(plan) <= _step_s(without) * (1 + 1e-9)
        assert not (plan.layout.recomputes and _step_s(plan) == _step_s(without))


def test_recomputation_that_saves_nothing_is_said_to_save_nothing() -> None:
    words = recompute_in_words(["blocks.0"], -0.22, 0.18)
    assert words == "recompute blocks.0: saves no memory (+22 %), +18 % time"


def test_all_is_refused_if_the_estimate_does_not_know_the_step() -> None:
    with pytest.raises(BadInput, match="the estimate does not say what each module keeps"):
        _plan(1e13, estimate=_estimate(1e13, step=None), recompute="all")


def test_memory_that_even_recomputation_exceeds_is_named() -> None:
    with pytest.raises(Infeasible, match=r"needs [\d.]+ GiB for \S+ and has [\d.]+"):
        _plan(0.36 * _need(_plain()))
