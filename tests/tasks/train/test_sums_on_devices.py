"""Ranks sum on GPUs if all are of one type and each rank has its own; else in host memory."""

from __future__ import annotations

import pytest

from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage
from trainwright.tasks.spec.pool import Device
from trainwright.tasks.train.worker_group import needs_transfers, sums_on_devices

GPU, OTHER = "nvidia-a100-80gb", "nvidia-v100-16gb"


def device(place: str) -> Device:
    """`host/type/index`."""
    host, kind, index = place.split("/")
    return Device(id=place, type=kind, host=host, address=host, index=int(index))


@pytest.mark.parametrize(
    ("places", "on_devices"),
    [
        ([f"a/{GPU}/0", f"a/{GPU}/1"], True),
        ([f"a/{GPU}/0", f"b/{GPU}/0", f"b/{GPU}/1"], True),
        ([f"a/{GPU}/0"], False),  # alone
        ([], False),
        ([f"a/{GPU}/0", f"a/{OTHER}/0"], False),
        ([f"a/{GPU}/0", "a/cpu/0"], False),
        ([f"a/{GPU}/0", f"a/{GPU}/0"], False),  # two ranks on one GPU
        (["a/cpu/0", "b/cpu/0"], False),
        (["a/emulated/0", "a/emulated/1"], False),
        (["a/amd-mi300x/0", "a/amd-mi300x/1"], False),
    ],
)
def test_sums_are_on_like_gpus_only(places: list[str], on_devices: bool) -> None:
    devices = [device(place) for place in places]
    assert sums_on_devices(devices) == on_devices
    assert needs_transfers([None], devices) == on_devices
    stages = [Stage(device=place, layers=["fc"]) for place in places]
    pipelines = [Pipeline(micro_batches=[1], stages=[one]) for one in stages]
    assert needs_transfers([None, Layout(pipelines=pipelines, sync={"fc": "rows"})], devices)
