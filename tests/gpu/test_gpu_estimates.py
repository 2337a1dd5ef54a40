"""Calibration of a GPU, and how well it predicts models that it has not measured."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from gpu_case import GROWTH, gpu, step_on, structure_of, summary, zoo

from trainwright.estimator.measure.network_timing import time_steps
from trainwright.estimator.memory.step_memory import peak_bytes
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.tasks.estimate.calibrate import calibrate

BUDGET_S = 50.0
CASES = 20
MOST_S = 50.0
"""Time for the models; the rest of them is left out on a slow machine."""
MOST_TIME_ERROR, MOST_MEMORY_ERROR = 0.5, 0.25


def test_a_calibrated_gpu_predicts_the_time_of_other_models(tmp_path: Path) -> None:
    device = gpu()
    made = calibrate(tmp_path / "gpu.json", budget_s=BUDGET_S, device="cuda:0", most_drift=9.0)
    assert made.device_type == device.device_type
    assert made.processor == device.name
    assert made.power is not None, "NVML's energy counter can't be read"
    print(
        f"{device.name}: {made.measurements} measurements in {made.duration_s:.0f} s, drift "
        f"{made.sentinel_drift:.1%}, cross-validated {made.cross_validated_error}, "
        f"{made.power.idle_w:.0f} W idle, {made.power.load_w:.0f} W at work"
    )
    assert 10 < made.power.idle_w < made.power.load_w < 1500
    calibrated, datasheet, began = [], [], time.monotonic()
    for case in zoo(CASES):
        if time.monotonic() - began > MOST_S:
            break
        batch = GROWTH * case.batch_size
        structure = structure_of(case)
        device.begin()
        step = device.finished(step_on(case, device, batch))
        for _ in range(3):
            step()
        measured = time_steps(step, 0.2)
        predicted = [
            predict_curve(structure, one, device_type=made.device_type, batch_size=batch)
            .step_time(batch)
            .median
            for one in (made, None)
        ]
        calibrated.append(predicted[0] / measured)
        datasheet.append(predicted[1] / measured)
        print(
            f"{case.label:50} {1e3 * measured:8.2f} ms, calibrated {calibrated[-1]:.2f}, "
            f"datasheet {datasheet[-1]:.2f} of it"
        )
    assert len(calibrated) >= 3
    print(summary("step time, calibrated", calibrated))
    print(summary("step time, by the datasheet", datasheet))
    assert statistics.median(abs(one - 1) for one in calibrated) < MOST_TIME_ERROR


def test_predicted_memory_is_that_of_the_caching_allocator() -> None:
    device, live, held, began = gpu(), [], [], time.monotonic()
    for case in zoo(CASES):
        if time.monotonic() - began > MOST_S:
            break
        batch = GROWTH * case.batch_size
        predicted = peak_bytes(structure_of(case), batch)
        device.begin()
        before = torch.cuda.memory_allocated()
        step = device.finished(step_on(case, device, batch))
        for _ in range(3):
            step()
        allocated = torch.cuda.max_memory_allocated() - before
        reserved = torch.cuda.max_memory_reserved()
        live.append(predicted / allocated)
        held.append(reserved / allocated)
        print(
            f"{case.label:50} {allocated / 2**20:8.1f} MiB live, predicted {live[-1]:.2f} of it, "
            f"reserved {held[-1]:.2f} times it"
        )
        del step
    assert len(live) >= 3
    print(summary("live memory", live))
    print(f"reserved / live: median {statistics.median(held):.2f}, most {max(held):.2f}")
    assert statistics.median(abs(one - 1) for one in live) < MOST_MEMORY_ERROR
