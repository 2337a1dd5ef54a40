"""Probing a device: this machine's CPU, for real and as shortly as it gets."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from trainwright.estimator.errors import BadInput
from trainwright.estimator.measure.probe import probe
from trainwright.estimator.measure.templates import TEMPLATES
from trainwright.estimator.predict.datasheet import FAMILIES
from trainwright.estimator.predict.step_work import cost_family
from trainwright.estimator.trace.recorder import Recorder


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_does_more_work_on_a_higher_rung(name: str) -> None:
    work = []
    for rung in (0, 2):
        call = TEMPLATES[name](rung, torch.device("cpu"))
        recorder = Recorder()
        with recorder, recorder.record() as recording:
            call()
        work.append(sum(one.flops + one.bytes + 1 for one in recording.operations))
    assert work[1] > 2 * work[0]


def test_the_templates_run_every_family_but_the_rest() -> None:
    seen = set()
    for template in TEMPLATES.values():
        recorder = Recorder()
        call = template(0, torch.device("cpu"))
        with recorder, recorder.record() as recording:
            call()
        seen |= {cost_family(one.family, one.dims) for one in recording.operations}
    assert set(FAMILIES) - seen == {"other"}


def test_probing_gives_a_few_shot_calibration_of_this_machine() -> None:
    said: list[str] = []
    found = probe(1.0, "cpu", 1, lambda message, _: said.append(message))
    assert (found.mode, found.device_type, found.threads) == ("few-shot", "cpu", 1)
    assert found.torch == importlib.metadata.version("torch")
    assert found.measurements >= 2 * len(TEMPLATES)
    assert found.step_deviation > 0
    assert found.sentinel_drift >= 0
    assert set(found.families) == set(FAMILIES)
    assert said


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "cuda", ""])
def test_a_device_that_torch_does_not_find_is_refused_with_those_that_it_does(device: str) -> None:
    with pytest.raises(BadInput, match=f"--device: got '{device}'; torch finds here: cpu"):
        probe(1.0, device, 1, lambda _: None)
