"""The file of samples: if it is truncated, complete lines stay, and more can be added."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.fit.step_fit import StepSample
from trainwright.estimator.measure.samples import KeptSamples
from trainwright.estimator.predict.machine_speed import Speed

SPEED = Speed(compute_s=1e-3, memory_s=1e-3, calls_s=1e-4)


def _sample(number: int) -> StepSample:
    return StepSample(
        family="conv", batch_size=number, seconds=0.01, speed=SPEED, ops_speed=SPEED, ops=()
    )


def _written(path: Path, count: int) -> bytes:
    path.unlink(missing_ok=True)
    kept = KeptSamples(path, "here")
    for number in range(1, count + 1):
        kept.append(_sample(number), float(number))
    return path.read_bytes()


@given(
    cut=st.integers(0, 10**4),
    rest=st.sampled_from([b"", b"\0\0\0\0", b"{", b"\xff\n", b"[]\n", b"{}\n"]),
)
def test_a_truncated_file_keeps_its_complete_lines_and_can_be_continued(
    cut: int, rest: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("kept") / "cpu.json.samples"
    whole = _written(path, 4)
    left = whole[: cut % (len(whole) + 1)]
    path.write_bytes(left + rest)
    lines = left.count(b"\n")
    kept = KeptSamples(path, "here")
    assert kept.samples == [_sample(number) for number in range(1, lines + 1)]
    assert kept.elapsed_s == lines
    kept.append(_sample(99), 99.0)
    again = KeptSamples(path, "here")
    assert again.samples == [*kept.samples[:lines], _sample(99)]
    assert again.elapsed_s == 99.0


def test_samples_of_another_setting_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json.samples"
    _written(path, 3)
    other = KeptSamples(path, "elsewhere")
    assert (other.samples, other.elapsed_s) == ([], 0.0)
    other.append(_sample(7), 7.0)
    assert KeptSamples(path, "elsewhere").samples == [_sample(7)]
    other.discard()
    assert not path.exists()


def test_without_a_file_samples_are_kept_in_memory() -> None:
    kept = KeptSamples(None, "here")
    kept.append(_sample(1), 1.0)
    kept.discard()
    assert kept.samples == [_sample(1)]
