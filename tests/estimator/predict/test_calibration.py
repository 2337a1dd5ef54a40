"""Fitting and storing a calibration. The measurements have known costs, which the fit must find."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from trainwright.estimator.curves import Affine
from trainwright.estimator.errors import BadInput
from trainwright.estimator.fit.step_fit import StepSample, fit, folds
from trainwright.estimator.lifetimes import Lifetimes
from trainwright.estimator.predict.calibration import (
    OTHER_TORCH_DEVIATION,
    Calibration,
    load,
    op_count,
    save,
)
from trainwright.estimator.predict.machine_speed import Speed
from trainwright.estimator.predict.op_cost import OpSample, Roofline
from trainwright.estimator.predict.step_time import estimate_step, predict_curve
from trainwright.estimator.quantiles import NINETY
from trainwright.estimator.structure import Operation, Structure

COSTS = {
    "conv": Roofline(latency_s=2e-5, flops_per_s=1e11, bytes_per_s=1e10),
    "elementwise": Roofline(latency_s=1e-6, flops_per_s=1e15, bytes_per_s=2e10),
}
SCALE, PER_OP_S, FIXED_S = 1.2, 5e-6, 1e-4


def _structure(convolutions: int, flops: float, elementwise: int = 40) -> Structure:
    none = Affine(fixed=0, per_sample=0)
    return Structure(
        batch_size=32,
        optimizer="adamw",
        precision="fp32",
        method="fake tensors",
        parameters=10,
        parameter_bytes=40,
        forward_flops_per_sample=flops,
        activation_bytes_per_sample=100,
        peak_memory_bytes=Affine(fixed=1000, per_sample=10),
        layers=[],
        features={},
        operations={},
        trace=[
            Operation(
                kind="aten.convolution",
                family="conv",
                count=convolutions,
                flops=Affine(fixed=0, per_sample=flops),
                bytes=Affine(fixed=1e4, per_sample=1e3),
                dims={"given": Affine(fixed=0, per_sample=250)},
            ),
            Operation(
                kind="aten.add",
                family="elementwise",
                count=elementwise,
                flops=none,
                bytes=Affine(fixed=1e5, per_sample=0),
            ),
        ],
    )


def _truth(structure: Structure, batch_size: int) -> float:
    ops = sum(
        one.count * float(COSTS[one.family](one.flops(batch_size), one.bytes(batch_size)))
        for one in structure.trace
    )
    return FIXED_S + SCALE * ops + PER_OP_S * op_count(structure)


def _samples(noise: float = 0.0, drift: float = 0.0, seed: int = 1) -> list[StepSample]:
    """Steps of four families; with `drift`, a step and its sentinel are slower by one factor."""
    draw, made = random.Random(seed), []
    for convolutions in (1, 2, 4, 8):
        for number in range(8):
            flops = 10 ** draw.uniform(4, 7.5)
            structure = _structure(convolutions, flops, elementwise=20 * convolutions)
            slower = 1 + (drift if number % 2 else 0.0)
            ops = tuple(
                OpSample(
                    kind=one.kind,
                    family=one.family,
                    dtype="float32",
                    flops=one.flops(32),
                    bytes=one.bytes(32),
                    dims={},
                    count=one.count,
                    seconds=slower * float(COSTS[one.family](one.flops(32), one.bytes(32))),
                )
                for one in structure.trace
            )
            seconds = slower * _truth(structure, 32) * (1 + noise * draw.uniform(-1, 1))
            speed = Speed(compute_s=1e-3 * slower, memory_s=2e-3 * slower, calls_s=1e-4 * slower)
            made.append(
                StepSample(
                    family=f"conv{convolutions}",
                    batch_size=32,
                    seconds=seconds,
                    speed=speed,
                    ops_speed=speed,
                    ops=ops,
                )
            )
    return made


def _calibration(noise: float = 0.0, drift: float = 0.0) -> Calibration:
    return _fit(_samples(noise, drift))


def _fit(samples: list[StepSample]) -> Calibration:
    return fit(
        samples,
        device_type="cpu",
        threads=1,
        dtype="float32",
        torch="2.0.0",
        processor="made up",
        created_at="2026-01-01T00:00:00+00:00",
        duration_s=1.0,
    )


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return _calibration()


def test_an_unmeasured_step_is_predicted(calibration: Calibration) -> None:
    structure = _structure(3, 3e6)
    predicted = calibration.step_times_s(structure, [32, 100])
    assert predicted == pytest.approx([_truth(structure, 32), _truth(structure, 100)], rel=0.1)
    assert calibration.measurements == sum(len(one.ops) + 1 for one in _samples())


def test_the_sentinel_corrects_the_drift_of_the_machine(calibration: Calibration) -> None:
    restless = _calibration(drift=0.5)
    assert restless.sentinel_drift == pytest.approx(0.4, abs=0.1)
    structure = _structure(3, 3e6)
    (calm,), (corrected,) = (one.step_times_s(structure, [32]) for one in (calibration, restless))
    assert corrected / calm == pytest.approx(
        1.25, rel=0.1
    )  # the median speed is half way between the two
    assert restless.cross_validated_error.p90 < 0.1


def test_the_correction_of_steps_is_used_if_it_helps(calibration: Calibration) -> None:
    assert calibration.correction.scale == pytest.approx(SCALE, rel=0.05)
    assert calibration.correction.per_op_s == pytest.approx(PER_OP_S, rel=0.3)
    assert calibration.correction.fixed_s == pytest.approx(FIXED_S, rel=0.3)


def _dear(structure: Structure) -> Structure:
    """The sample with convolutions of another kind, which take `DEARER` times as long in steps."""
    first, *others = structure.trace
    return structure.model_copy(
        update={"trace": [first.model_copy(update={"kind": "aten.dear"}), *others]}
    )


DEARER = 1.5


def test_an_operation_that_takes_longer_within_steps_is_predicted_to() -> None:
    samples = _samples()
    for number, one in enumerate(samples):
        if number % 4 >= 2:
            first, *others = one.ops
            seconds = one.seconds + SCALE * (DEARER - 1) * first.count * first.seconds
            ops = (first.model_copy(update={"kind": "aten.dear"}), *others)
            samples[number] = one.model_copy(update={"seconds": seconds, "ops": ops})
    found = _fit(samples)
    assert found.cross_validated_error.p90 < 0.15
    structure = _structure(3, 3e6)
    own = structure.trace[0]
    more = SCALE * (DEARER - 1) * own.count * float(COSTS["conv"](own.flops(32), own.bytes(32)))
    assert found.step_times_s(structure, [32]) == pytest.approx([_truth(structure, 32)], rel=0.1)
    assert found.step_times_s(_dear(structure), [32]) == pytest.approx(
        [_truth(structure, 32) + more], rel=0.1
    )


def test_error_and_interval_come_from_networks_that_the_fit_left_out(
    calibration: Calibration,
) -> None:
    assert calibration.cross_validated_error.p90 < 0.1
    found = calibration.uncertainty(_structure(3, 3e6), 32)
    assert 0.85 < found.low_factor < 1 < found.high_factor < 1.2
    noisy = _calibration(noise=0.4)
    assert noisy.cross_validated_error.median > 0.05
    found = noisy.uncertainty(_structure(3, 3e6), 32)
    assert found.high_factor - found.low_factor > 0.3


def test_the_interval_contains_nine_tenths_of_unmeasured_networks() -> None:
    inside, cases = 0, 0
    for seed in range(6):
        found = _fit(_samples(noise=0.4, seed=seed))
        for one in _samples(noise=0.4, seed=100 + seed):
            structure = _structure(
                one.ops[0].count, one.ops[0].flops / 32, elementwise=one.ops[1].count
            )
            (predicted,), about = found.step(structure, [32], 32)
            inside += about.low_factor <= one.seconds / predicted <= about.high_factor
            cases += 1
    assert inside / cases == pytest.approx(0.9, abs=0.07)


def test_each_fold_has_its_share_of_every_family() -> None:
    in_turn = [_samples()[number % 4 * 8 + number // 4] for number in range(32)]
    parts = folds(in_turn)
    assert sorted(one.seconds for part in parts for one in part) == sorted(
        one.seconds for one in in_turn
    )
    assert all(
        Counter(one.family for one in part) == Counter(f"conv{size}" for size in (1, 2, 4, 8))
        for part in parts
    )
    assert folds(in_turn[:3]) == [[one] for one in sorted(in_turn[:3], key=lambda one: one.family)]


def test_the_interval_is_of_wall_clock_time_under_the_load_seen_in_calibration(
    calibration: Calibration,
) -> None:
    restless = _calibration(drift=0.5)
    found = restless.uncertainty(_structure(3, 3e6), 32)
    assert calibration.uncertainty(_structure(3, 3e6), 32).high_factor < 1.2
    assert found.high_factor == pytest.approx(
        1.25, rel=0.1
    )  # half of the steps at 1, half at 1.5 times; normalised to 1.25


def test_unmeasured_operations_lower_the_coverage_and_are_named(
    calibration: Calibration,
) -> None:
    known = _structure(3, 3e6)
    strange = known.trace[1].model_copy(
        update={"kind": "aten.fft", "family": "other", "count": 400}
    )
    unknown = known.model_copy(update={"trace": [*known.trace, strange]})
    sure, unsure = (calibration.uncertainty(one, 32) for one in (known, unknown))
    assert (sure.coverage, sure.unknown) == (1.0, ())
    assert 0.0 < unsure.coverage < 0.9
    assert unsure.unknown == ("aten.fft",)
    assert calibration.step_times_s(unknown, [32]) > calibration.step_times_s(known, [32])
    assert unsure.low_factor < sure.low_factor < 1 < sure.high_factor < unsure.high_factor


def test_unmeasured_half_precision_is_named(calibration: Calibration) -> None:
    known = _structure(3, 3e6)
    half = known.model_copy(
        update={"trace": [one.model_copy(update={"dtype": "bfloat16"}) for one in known.trace]}
    )
    found = calibration.uncertainty(half, 32)
    assert found.coverage == pytest.approx(0.0, abs=1e-9)
    assert found.unknown == ("aten.convolution in bfloat16", "aten.add in bfloat16")


def test_a_calibration_survives_writing_and_reading(
    calibration: Calibration, tmp_path: Path
) -> None:
    path = tmp_path / "sub" / "cpu.json"
    save(calibration, path)
    assert load(path, "2.0.0") == calibration
    assert [one.name for one in path.parent.iterdir()] == ["cpu.json"]


def test_calibrations_of_earlier_versions_are_readable(
    calibration: Calibration, tmp_path: Path
) -> None:
    path = tmp_path / "cpu.json"
    lacking = {
        3: ("loop", "first_touch_s_per_byte"),
        4: ("first_touch_s_per_byte",),
        6: (),
        7: (),
        8: (),
    }
    for version, lacks in lacking.items():
        document = json.loads(calibration.model_dump_json()) | {"schema_version": version}
        for name in lacks:
            del document[name]
        path.write_text(json.dumps(document))
        assert load(path) == calibration.model_copy(
            update={"schema_version": version, "loop": None}
        )
    del document["correction"]["fixed_s"]
    path.write_text(json.dumps(document | {"schema_version": 5}))
    assert load(path).correction == calibration.correction.model_copy(update={"fixed_s": 0.0})


def test_blocks_returned_to_the_kernel_cost_their_first_touch_in_each_step(
    calibration: Calibration,
) -> None:
    sizes = (Affine(fixed=0.0, per_sample=2.0**20), Affine(fixed=100.0, per_sample=0.0))
    structure = _structure(2, 1e6).model_copy(
        update={"lifetimes": Lifetimes(sizes=sizes, start=(1,), step=(0, 0, 1, -2, -3, -4))}
    )
    touching = calibration.model_copy(update={"first_touch_s_per_byte": 1e-9})
    batches = [16, 31, 32, 64]
    plain, more = (one.step_times_s(structure, batches) for one in (calibration, touching))
    added = [after - before for before, after in zip(plain, more, strict=True)]
    assert added == pytest.approx([0.0, 0.0, 2 * 32 * 2**20 * 1e-9, 2 * 64 * 2**20 * 1e-9])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        ("", "truncated"),
        ("{}", "it has no schema_version"),
        ("[]", "it has no schema_version"),
        ('{"schema_version": 3', "truncated"),
        ('{"schema_version": 3}', "not a calibration: device_type is missing"),
        ('{"schema_version": [], "device_type": "cpu"}', r"schema version \[\]"),
        ('{"schema_version": 99, "device_type": "cpu"}', "schema version 99"),
        ('{"schema_version": 2, "layers": []}', "is not a calibration; calibrate again"),
        (b"\xff\xfe\x00", "not a calibration"),
        ("[" * 100_000, "not a calibration"),
    ],
)
def test_a_file_that_is_not_a_calibration_gives_one_line(
    content: str | bytes | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "cpu.json"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=says) as raised:
        load(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_truncated_calibration_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    save(calibration, path)
    whole = path.read_text()
    for part in range(1, 10):
        path.write_text(whole[: len(whole) * part // 10])
        with pytest.raises(BadInput):
            load(path)


def test_a_calibration_of_another_torch_predicts_the_same_with_a_wider_interval_and_says_so(
    calibration: Calibration, tmp_path: Path
) -> None:
    path = tmp_path / "cpu.json"
    save(calibration, path)
    same, other = load(path, "2.0.0"), load(path, "2.1.0")
    assert same == calibration
    assert same.torch_note() is None
    assert (other.torch, other.measured_torch) == ("2.1.0", "2.0.0")
    assert "measured with torch 2.0.0; torch 2.1.0 is installed" in str(other.torch_note())
    assert "`trainwright calibrate` measures again" in str(other.torch_note())
    step = _structure(3, 1e6)
    narrow, wide = (predict_curve(step, one, device_type="cpu", cores=1.0) for one in (same, other))
    assert wide.step_time(32).median == narrow.step_time(32).median
    widened = math.log(wide.high_factor) ** 2 - math.log(narrow.high_factor) ** 2
    assert widened == pytest.approx((NINETY * OTHER_TORCH_DEVIATION) ** 2)
    assert estimate_step(narrow, 32)["notes"] == []
    assert estimate_step(wide, 32)["notes"] == [other.torch_note()]
    assert wide.basis is not None
    assert wide.basis.torch == "2.1.0"  # finished runs with this torch correct its predictions


def test_a_structure_of_another_torch_widens_the_interval_once(calibration: Calibration) -> None:
    plain = _structure(3, 1e6)
    curves = {
        (traced, torch): predict_curve(
            plain.model_copy(update={"torch": traced}),
            calibration.for_torch(torch),
            device_type="cpu",
            cores=1.0,
        )
        for traced in (None, "2.0.0", "2.1.0")
        for torch in ("2.0.0", "2.1.0")
    }
    narrow, wide = curves[None, "2.0.0"].high_factor, curves[None, "2.1.0"].high_factor
    assert curves["2.0.0", "2.0.0"].high_factor == narrow < wide
    assert curves["2.1.0", "2.0.0"].high_factor == wide
    assert curves["2.0.0", "2.1.0"].high_factor == curves["2.1.0", "2.1.0"].high_factor == wide
    [note] = curves["2.1.0", "2.0.0"].notes
    assert "traced with torch 2.1.0" in note
    assert "`trainwright extract` traces again" in note


def test_predicting_loads_no_torch(calibration: Calibration, tmp_path: Path) -> None:
    save(calibration, tmp_path / "cpu.json")
    (tmp_path / "structure.json").write_text(_structure(2, 1e6).model_dump_json())
    code = """
import sys
from pathlib import Path
from trainwright.estimator.predict.calibration import load
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.estimator.structure import Structure
folder = Path(sys.argv[1])
structure = Structure.model_validate_json((folder / "structure.json").read_bytes())
curve = predict_curve(structure, load(folder / "cpu.json"), device_type="cpu", cores=1.0)
assert curve.mode == "calibrated"
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
