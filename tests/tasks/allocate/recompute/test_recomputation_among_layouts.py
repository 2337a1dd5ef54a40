"""A plan in which devices recompute is compared with all other layouts, and they with it."""

from __future__ import annotations

import functools
from typing import Any

from plans import DATA
from recorded_models import wide_structure

from trainwright.estimator.predict.step_time import predict_curve
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool

_TYPE = "nvidia-t4"


@functools.cache
def _estimate(limit: float, times: float) -> Estimate:
    """`times`: how many times as large all gradients are together."""
    structure = wide_structure()
    curve = predict_curve(structure, None, device_type=_TYPE)
    return Estimate(
        mode="datasheet",
        gradient_bytes=times * structure.parameter_bytes,
        curves=[curve.model_copy(update={"memory_limit_bytes": limit})],
        layers=[one.facts() for one in structure.layer_work],
        units=structure.units,
        step=structure.recorded_step(),
    )


def _plan(limit: float, network: str, most: int | None = 1, times: float = 1, **train: Any) -> Plan:
    """For two GPUs of this memory, each on a host."""
    pool = Pool.model_validate(
        {
            "name": "p",
            "network": {"bandwidth": network, "latency": "20us"},
            "hosts": [
                {"name": name, "address": f"10.0.0.{place}", "devices": [{"type": _TYPE}]}
                for place, name in enumerate("ab", 1)
            ],
        }
    )
    job = Job.model_validate(
        {
            "name": "j",
            "data": {"uri": "builtin:digits"},
            "objective": {"minimize": "time"},
            "devices": {"min_count": 2},
            "train": {"global_batch_size": 256, **train},
        }
    )
    return make_plan(job, pool, _estimate(limit, times), DATA, most_accumulation=most)


def _layout(plan: Plan) -> Layout:
    assert plan.layout is not None
    return plan.layout


def _step_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s.median


@functools.cache
def _tight() -> float:
    """A memory that does not hold half of the batch on each device."""
    return 0.8 * _plan(1e12, "10Gbit", layout="data-parallel").devices[0].peak_memory_bytes


def test_recomputing_devices_are_compared_with_pipelines() -> None:
    plan = _plan(_tight(), "100Gbit")
    assert _layout(plan).name == "data-parallel"
    assert _layout(plan).recomputes
    (pipeline,) = [one for one in plan.alternatives if one.layout == "pipeline"]
    assert "stages: " in pipeline.layout_in_words
    assert pipeline.reason


def test_a_pipeline_that_is_faster_than_recomputing_devices_is_chosen() -> None:
    plan = _plan(_tight(), "1Gbit", times=1000)
    given = _plan(_tight(), "1Gbit", times=1000, layout="data-parallel")
    assert _layout(given).recomputes
    assert _layout(plan).name == "pipeline"
    assert _step_s(plan) < 0.9 * _step_s(given)
    assert "than data-parallel with recomputation, by prediction" in (plan.layout_rule or "")
    assert all(one.peak_memory_bytes <= _tight() for one in plan.devices)
    others = [one for one in plan.alternatives if one.layout == "data-parallel"]
    assert any("recompute " in one.layout_in_words for one in others)
    assert all("times as long" in one.reason for one in others)


def test_sharded_and_late_multiplied_layers_are_compared_with_recomputation() -> None:
    plan = _plan(_tight(), "1Gbit", most=None)
    names = {_layout(plan).name, *(one.layout for one in plan.alternatives if one.layout)}
    assert {"data-parallel", "pipeline"} <= names
    assert names & {"sharded", "late-multiply", "hybrid"}
