"""What passes of a pipeline take a rank beside its layers."""

from __future__ import annotations

import pytest

from trainwright.estimator.curves import Affine, DeviceCurve
from trainwright.estimator.predict.pass_cost import PassCost, is_part_of_its_time

COST = PassCost(pass_s=1.0, message_s=2.0, byte_s=0.5, delay_s=9.0, layer_s=4.0, measured=True)


def curve(device_type: str, cores: float | None) -> DeviceCurve:
    line = Affine(fixed=0.0, per_sample=1.0)
    return DeviceCurve(
        device_type=device_type,
        cores=cores,
        mode="datasheet",
        coverage=0.0,
        step_time_s=line,
        low_factor=1.0,
        high_factor=1.0,
        peak_memory_bytes=line,
    )


@pytest.mark.parametrize(
    ("device_type", "cores", "seconds"),
    [
        ("cpu", 1.0, 1 + 2 * 2 + 6 * 0.5),
        ("cpu", 4.0, 1 + 2 * 2 + 6 * 0.5),
        ("cpu", 0.5, 2 * (1 + 2 * 2 + 6 * 0.5)),
        ("nvidia-t4", None, 1 + 2 * 2 + 6 * 0.5),
        ("emulated", None, 1 + 2 * 2 + 6 * 0.5 + 3 * 4),
    ],
)
def test_a_pass_takes_its_messages_and_bytes_on_the_ranks_core(
    device_type: str, cores: float | None, seconds: float
) -> None:
    own = COST.on(curve(device_type, cores))
    assert own.seconds(messages=2, moved_bytes=6, layers=3) == seconds
    assert own.delay_s == COST.delay_s


def test_only_an_emulated_devices_own_work_is_part_of_its_time() -> None:
    assert is_part_of_its_time(curve("emulated", None))
    assert not is_part_of_its_time(curve("cpu", 1.0))
