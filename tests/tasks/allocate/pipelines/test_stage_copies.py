"""Stages need memory for their own part of the model's state; data-parallel ranks for all of it."""

from __future__ import annotations

import functools

import pytest
import torch
from layout_plans import case
from pipeline_cases import blocks, units_of
from torch import nn

from trainwright.estimator.predict.step_time import predict_curve
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.trace import trace
from trainwright.estimator.trace.training_step import TrainingStepSpec
from trainwright.tasks.allocate.pipelines.stage_memory import StageMemory, StageTensors
from trainwright.tasks.allocate.pipelines.stage_peaks import StageWorkload
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.eligibility import usable

PROCESS, ELEMENTS = 1.5e8, 12_000_000
WIDTH, LAYERS = 1024, 8


def planned(memory: float, layout: str, *, builds_parts: bool = True) -> Plan:
    layers = blocks(elements=ELEMENTS)
    job, pool, estimate, data = case(layers, memory=memory, layout=layout, hosts=8)
    kept = 7 * estimate.gradient_bytes  # AdamW: sums of gradients, two copies of three tensors
    process = {"process_bytes": PROCESS + kept, "kept_bytes": kept}
    curves = [one.model_copy(update=process) for one in estimate.curves]
    update = {"curves": curves, "units": units_of(layers), "builds_parts": builds_parts}
    return make_plan(job, pool, estimate.model_copy(update=update), data)


def test_a_model_whose_state_exceeds_each_device_is_feasible_as_a_pipeline() -> None:
    state = 3 * sum(one.parameter_bytes for one in blocks(elements=ELEMENTS))
    memory = 0.99 * state
    found = planned(memory, "pipeline")
    assert found.feasible
    assert found.layout is not None
    assert max(one.peak_memory_bytes for one in found.devices) <= memory
    assert planned(memory, "auto").layout == found.layout
    for layout in ("data-parallel", "auto"):
        with pytest.raises(Infeasible):
            planned(memory, layout, builds_parts=layout == "data-parallel")


def test_ranks_that_can_not_build_parts_are_charged_the_whole_model() -> None:
    state = 3 * sum(one.parameter_bytes for one in blocks(elements=ELEMENTS))
    with pytest.raises(Infeasible) as refused:
        planned(0.99 * state, "pipeline", builds_parts=False)
    assert refused.value.details["needed_bytes"] > PROCESS + 7 / 3 * state  # type: ignore[operator]


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self[0].register_buffer("table", torch.zeros(WIDTH, 3))


@functools.cache
def structure(*, adapts: bool = False) -> Structure:
    def example(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(size, WIDTH), torch.zeros(size, dtype=torch.int64)

    adapt = (lambda *_: None) if adapts else None
    definition = ModelDefinition(Blocks, example, nn.functional.cross_entropy, adapt)
    return trace(TrainingStepSpec(definition, {}, None, {"name": "adamw"}), 8)


def memory_of(traced: Structure, device_type: str = "cpu") -> StageMemory:
    curve = predict_curve(traced, None, device_type=device_type, cores=1.0)
    layers = [one.facts() for one in traced.layer_work]
    job, pool, estimate, data = case(layers)
    estimate = estimate.model_copy(
        update={
            "curves": [curve],
            "units": traced.units,
            "builds_parts": traced.builds_parts,
            "step": traced.recorded_step(),
            "gradient_bytes": float(traced.parameter_bytes),
        }
    )
    devices = usable(pool, job)
    return StageMemory(CostModel(job, pool, estimate, data), layers, devices)


def need(memory: StageMemory, first: int, end: int) -> float:
    work = StageWorkload(first, end, "1f1b", 0, 2, (4, 4))
    return memory.need(0, StageTensors(work, 0.0, 0.0))


def test_a_stage_needs_no_less_than_its_state_and_less_with_fewer_layers() -> None:
    traced = structure()
    assert traced.builds_parts
    memory, units = memory_of(traced), len(traced.units)
    assert units == LAYERS
    process, own = memory.process_bytes(0), 4 * (WIDTH * WIDTH + WIDTH)
    buffer = 4 * 3 * WIDTH
    for first in range(units):
        for end in range(first + 1, units + 1):
            found = need(memory, first, end)
            # Its state with gradients, their sums, and two copies of the state.
            assert found >= process + (4 + 1 + 2 * 3) * (end - first) * own + 3 * buffer
            if end - first > 1:
                assert need(memory, first + 1, end) < found
                assert need(memory, first, end - 1) < found
    curve = predict_curve(traced, None, device_type="cpu", cores=1.0)
    assert need(memory, 0, units // 2) < 0.6 * curve.device_memory_bytes(8) + process


def test_a_model_with_adapt_is_built_whole() -> None:
    traced = structure(adapts=True)
    assert not traced.builds_parts
    memory, curve = memory_of(traced), predict_curve(traced, None, device_type="cpu", cores=1.0)
    assert memory.process_bytes(0) == curve.process_bytes
    assert need(memory, 0, 1) > curve.process_bytes + 4 * 4 * WIDTH * WIDTH


def test_a_small_checkpoint_is_written_by_one_rank() -> None:
    small = structure().model_copy(deep=True)
    layers = small.layer_work[:2]
    memory = memory_of(small)
    assert memory.copies.is_divided
    few = small.model_copy(
        update={
            "layer_work": [one.model_copy(update={"parameter_bytes": 1e3}) for one in layers],
            "parameter_bytes": 2000,
            "units": small.units[:2],
            "idle_bytes": small.idle_bytes.model_copy(update={"fixed": 8000.0}),
            "lifetimes": None,
        }
    )
    assert not memory_of(few).copies.is_divided
