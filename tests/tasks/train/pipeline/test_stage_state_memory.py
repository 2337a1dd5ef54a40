"""The memory of real ranks of a pipeline, against its plan and one rank with the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_ranks import structure_of
from staged_case import with_stages
from training_case import NO_SPARE, request

from trainwright.estimator.predict.step_time import predict_curve
from trainwright.tasks.allocate.pipelines.stage_memory import StageMemory, StageTensors
from trainwright.tasks.allocate.pipelines.stage_peaks import StageWorkload
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.train import TrainRequest, train

_SPEED = 1e6
_MODEL = """
import torch

def build_model():
    wide = [layer for _ in range(4) for layer in (torch.nn.Linear(3456, 3456), torch.nn.ReLU())]
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 3456), *wide, torch.nn.Linear(3456, 10)
    )
"""


def asked(folder: Path, batch_sizes: list[int]) -> TrainRequest:
    """Two steps, with a checkpoint after each."""
    found = request(
        folder,
        batch_sizes,
        validation_fraction=1100 / 1797,
        backend="torch",
        optimizer={"name": "adamw"},
        checkpoint={"every_steps": 1},
        **NO_SPARE,
    )
    (Path(found.source_folder) / "net.py").write_text(_MODEL)
    return found


def planned_bytes(pipeline: TrainRequest) -> list[float]:
    structure = structure_of(pipeline, 64, "adamw")
    assert structure.builds_parts
    curve = predict_curve(structure, None, device_type="emulated", speed=_SPEED)
    layers = [one.facts() for one in structure.layer_work]
    estimate = Estimate(
        mode="datasheet",
        curves=[curve],
        layers=layers,
        units=structure.units,
        builds_parts=structure.builds_parts,
        step=structure.recorded_step(),
        gradient_bytes=float(structure.parameter_bytes),
    )
    devices = [{"type": "emulated", "speed": _SPEED, "count": 2}]
    pool = Pool.model_validate({"name": "p", "hosts": [{"name": "here", "devices": devices}]})
    model = CostModel(pipeline.job, pool, estimate, pipeline.schema_)
    memory = StageMemory(model, layers, pool.devices())
    layout, units = pipeline.plan.layout, len(structure.units)
    assert layout is not None
    one = layout.pipelines[0]
    cut, sizes = len(one.stages[0].layers), tuple(one.micro_batches)
    return [
        memory.need(
            stage, StageTensors(StageWorkload(*span, layout.schedule, stage, 2, sizes), 0.0, 0.0)
        )
        for stage, span in enumerate([(0, cut), (cut, units)])
    ]


def measured_bytes(result: Result) -> list[float]:
    assert result.steps == 2
    return [one.peak_memory_bytes for one in result.devices]


@pytest.mark.slow
def test_ranks_of_a_pipeline_need_memory_for_their_own_part_of_the_state(tmp_path: Path) -> None:
    parameters = 4 * (4 * 3456 * 3457 + 3456 * 65 + 3457 * 10)
    assert 1e8 < parameters < 2e8
    pipeline = with_stages(asked(tmp_path / "pipeline", [350, 0]), [([88, 87] * 2, [0.5])])
    stages, planned = measured_bytes(train(pipeline)), planned_bytes(pipeline)
    (whole,) = measured_bytes(train(asked(tmp_path / "whole", [350])))
    # It has parameters, gradients, their sums, two moments: a stage has half of that, and loads
    # more libraries. Copies for checkpoints are in shared memory, which counts for no process.
    for measured, expected in zip(stages, planned, strict=True):
        assert measured < expected
        assert measured < whole - 1.2 * parameters
