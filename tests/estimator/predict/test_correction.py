"""Finished runs correct predictions of the same hardware, within bounds."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.curves import Affine, Basis, DeviceCurve, Interval, Knots
from trainwright.estimator.predict.correction import Finding, FinishedRun, learn
from trainwright.estimator.predict.step_time import estimate_step

SIZES = (4, 8, 16, 32, 64, 128, 256)
LOW, HIGH = 0.8, 1.3
SIGMA = math.log(HIGH / LOW) / 3.29

KINDS = ["resnet", "lstm", "transformer", "perceptron"]
MODELS = st.sampled_from(KINDS)
SHARES = {
    "resnet": {"conv": 0.8, "elementwise": 0.2},
    "lstm": {"recurrent": 0.9, "elementwise": 0.1},
    "transformer": {"matmul": 0.6, "attention": 0.3, "elementwise": 0.1},
    "perceptron": {"matmul": 0.7, "elementwise": 0.3},
}


def _basis(model: str, **changes: str) -> Basis:
    facts = {"calibration": "0", "processor": "made up", "torch": "2.0.0"} | changes
    return Basis(model=model, shares=SHARES[model], **facts)


def _curve(model: str = "resnet", **changes: Any) -> DeviceCurve:
    times, memory = [0.01 + 0.001 * size for size in SIZES], [5e8 + 1e6 * size for size in SIZES]
    facts = {
        "device_type": "cpu",
        "cores": 1.0,
        "mode": "calibrated",
        "coverage": 1.0,
        "step_time_s": Affine(fixed=0.01, per_sample=0.001),
        "time_knots": Knots(sizes=SIZES, values=tuple(times)),
        "low_factor": LOW,
        "high_factor": HIGH,
        "peak_memory_bytes": Affine(fixed=5e8, per_sample=1e6),
        "memory_knots": Knots(sizes=SIZES, values=tuple(memory)),
        "memory_safe_factor": 1.25,
        "idle_w": 2.0,
        "load_w": 8.0,
        "energy_source": "datasheet",
        "basis": _basis(model),
    }
    return DeviceCurve.model_validate(facts | changes)


def _run(
    number: int,
    factor: float,
    model: str = "resnet",
    batch_size: int = 32,
    memory: float = 1.0,
    **changes: Any,
) -> FinishedRun:
    """A run whose steps took `factor` times the calibration's prediction."""
    curve = _curve(model)
    seconds = factor * curve.step_time(batch_size).median
    found = {
        "basis": _basis(model),
        "cores": 1.0,
        "batch_size": batch_size,
        "steps": 200,
        "predicted_step_time_s": curve.step_time(batch_size).median,
        "measured_step_time_s": Interval(median=seconds, low=0.95 * seconds, high=1.1 * seconds),
        "memory_batch_size": batch_size,
        "predicted_peak_memory_bytes": curve.memory_bytes(batch_size),
        "measured_peak_memory_bytes": memory * curve.memory_bytes(batch_size),
    } | changes
    return FinishedRun(
        run=f"run {number:03d}", device_type="cpu", findings=(Finding.model_validate(found),)
    )


def _width(curve: DeviceCurve) -> float:
    return curve.high_factor / curve.low_factor


def test_without_runs_nothing_changes() -> None:
    assert learn(_curve(), []) == _curve()


@pytest.mark.parametrize(
    "run",
    [
        _run(1, 2.0, basis=_basis("resnet", processor="another")),
        _run(1, 2.0, basis=_basis("resnet", torch="2.0.1")),
        _run(1, 2.0).model_copy(update={"device_type": "nvidia-t4"}),
        _run(1, 2.0).model_copy(update={"findings": ()}),
    ],
    ids=["processor", "torch", "device type", "nothing found"],
)
def test_a_run_on_another_device_processor_or_torch_changes_nothing(run: FinishedRun) -> None:
    assert learn(_curve(), [run]) == _curve()


def test_the_training_loops_time_is_not_learned_twice() -> None:
    """A run was predicted without the loop, and took the curve's time with it: no error."""
    added = Affine(fixed=0.004, per_sample=0.0)
    times = tuple(0.014 + 0.001 * size for size in SIZES)
    curve = _curve(time_knots=Knots(sizes=SIZES, values=times), loop_s=added)
    took = Interval(median=0.046, low=0.044, high=0.05)
    before = _run(1, 1.0, measured_step_time_s=took, predicted_step_time_s=0.042)
    with_it = _run(
        1, 1.0, measured_step_time_s=took, predicted_step_time_s=0.046, predicted_loop_s=0.004
    )
    for run in (before, with_it):
        assert learn(curve, [run]).step_time(32).median == pytest.approx(0.046)


def test_a_prediction_without_a_calibration_is_not_corrected() -> None:
    curve = _curve(basis=None, mode="datasheet")
    assert learn(curve, [_run(1, 2.0)]) == curve


@settings(deadline=None)
@given(st.floats(0.3, 3.0), MODELS, st.sampled_from(SIZES))
def test_after_a_run_the_prediction_of_its_step_is_closer_to_its_measurement(
    factor: float, model: str, size: int
) -> None:
    curve = _curve(model)
    learned = learn(curve, [_run(1, factor, model, size)])
    before, after = curve.step_time(size).median, learned.step_time(size).median
    took = factor * before
    assert abs(math.log(after / took)) <= abs(math.log(before / took))
    assert (after - before) * (took - before) >= 0
    assert learned.learned_from == 1
    assert learned.mode == "calibrated"


@settings(deadline=None)
@given(st.floats(LOW, HIGH), MODELS, st.sampled_from(SIZES))
def test_many_runs_of_a_model_determine_its_prediction(
    factor: float, model: str, size: int
) -> None:
    learned = learn(_curve(model), [_run(number, factor, model, size) for number in range(12)])
    assert learned.step_time(size).median == pytest.approx(
        factor * _curve(model).step_time(size).median, rel=0.1
    )
    assert _width(learned) < _width(_curve())


def test_a_run_corrects_its_own_model_most_then_similar_ones_then_dissimilar_ones() -> None:
    runs = [_run(1, 1.3, "transformer")]
    moved = [
        learn(_curve(model), runs).step_time(32).median
        for model in ("transformer", "perceptron", "lstm")
    ]
    assert moved[0] > moved[1] > moved[2] > _curve().step_time(32).median


def test_a_share_of_a_core_learns_less_from_runs_on_a_whole_core() -> None:
    run = [_run(1, 1.3)]
    assert (
        learn(_curve(cores=0.5), run).step_time(32).median
        < learn(_curve(), run).step_time(32).median
    )


def test_runs_predicted_with_another_calibration_of_the_device_count_less() -> None:
    ours, others = [_run(1, 1.3)], [_run(1, 1.3, basis=_basis("resnet", calibration="1"))]
    assert learn(_curve(), others).step_time(32).median < learn(_curve(), ours).step_time(32).median


@settings(deadline=None)
@given(
    off=st.floats(-SIGMA / 2, SIGMA / 2),
    seen=st.lists(st.tuples(MODELS, st.sampled_from(SIZES)), min_size=1, max_size=12),
    model=MODELS,
)
def test_more_runs_that_agree_never_widen_the_interval(
    off: float, seen: list[tuple[str, int]], model: str
) -> None:
    runs = [_run(number, math.exp(off), kind, size) for number, (kind, size) in enumerate(seen)]
    widths = [_width(learn(_curve(model), runs[:count])) for count in range(len(runs) + 1)]
    assert widths[0] == pytest.approx(HIGH / LOW)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(widths))


def test_runs_that_contradict_the_interval_widen_it_for_other_models() -> None:
    runs = [
        _run(number, 3.0 if number % 2 else 1 / 3, ("resnet", "transformer")[number % 2])
        for number in range(6)
    ]
    assert _width(learn(_curve("lstm"), runs)) > _width(_curve())


@settings(deadline=None)
@given(
    wild=st.floats(1e-6, 1e6),
    kind=MODELS,
    others=st.lists(
        st.tuples(MODELS, st.sampled_from(SIZES), st.floats(0.97, 1.03)), min_size=6, max_size=12
    ),
    model=MODELS,
)
def test_one_outlier_among_many_runs_hardly_moves_other_models(
    wild: float, kind: str, others: list[tuple[str, int, float]], model: str
) -> None:
    runs = [_run(number, factor, one, size) for number, (one, size, factor) in enumerate(others)]
    without, with_it = (
        learn(_curve(model), each).step_time(32).median
        for each in (runs, [*runs, _run(99, wild, kind)])
    )
    if model != kind:
        assert abs(math.log(with_it / without)) < 0.2


@settings(deadline=None)
@given(wild=st.floats(1e-9, 1e9), model=MODELS, kind=MODELS)
def test_a_single_outlier_moves_predictions_by_a_bounded_amount(
    wild: float, model: str, kind: str
) -> None:
    learned = learn(_curve(model), [_run(1, wild, kind)])
    for size in SIZES:
        assert (
            abs(math.log(learned.step_time(size).median / _curve(model).step_time(size).median))
            <= 2.0
        )


@pytest.mark.parametrize("speed", [0.3, 3.0])
@pytest.mark.parametrize("model", KINDS)
def test_after_the_machines_speed_has_changed_newer_runs_count_more(
    speed: float, model: str
) -> None:
    kinds = [(kind, size) for size in SIZES for kind in KINDS]
    samples = [(kind, size, 1.0) for kind, size in (kinds * 3)[:12]] + [
        (kind, size, speed) for kind, size in (kinds * 2)[:8]
    ]
    runs = [_run(number, factor, kind, size) for number, (kind, size, factor) in enumerate(samples)]
    next_one = learn(_curve(model), runs).step_time(32).median / _curve(model).step_time(32).median
    assert abs(math.log(next_one / speed)) < abs(math.log(next_one))
    back = [
        one.model_copy(update={"run": f"run {len(runs) - number:03d}"})
        for number, one in enumerate(runs)
    ]
    reverse = learn(_curve(model), back).step_time(32).median / _curve(model).step_time(32).median
    assert abs(math.log(reverse)) < abs(math.log(next_one))


@settings(deadline=None)
@given(
    st.lists(st.tuples(MODELS, st.sampled_from(SIZES), st.floats(0.2, 5.0)), max_size=10),
    st.randoms(),
)
def test_the_order_of_runs_does_not_matter(
    seen: list[tuple[str, int, float]], shuffle: random.Random
) -> None:
    runs = [_run(number, factor, kind, size) for number, (kind, size, factor) in enumerate(seen)]
    other = list(runs)
    shuffle.shuffle(other)
    assert learn(_curve(), other) == learn(_curve(), runs)


@settings(deadline=None)
@given(
    st.lists(st.tuples(MODELS, st.sampled_from(SIZES), st.floats(0.1, 10.0)), max_size=10), MODELS
)
def test_a_corrected_step_with_more_samples_never_takes_less_time(
    seen: list[tuple[str, int, float]], model: str
) -> None:
    runs = [
        _run(number, factor, kind, size, memory=factor)
        for number, (kind, size, factor) in enumerate(seen)
    ]
    learned = learn(_curve(model), runs)
    values = [learned.step_time(size).median for size in SIZES]
    assert values == sorted(values)
    assert values[0] > 0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(MODELS, st.sampled_from(SIZES), st.floats(0.2, 20.0)), min_size=1, max_size=8
    )
)
def test_a_ranks_predicted_memory_is_never_below_the_models_measured_one(
    seen: list[tuple[str, int, float]],
) -> None:
    runs = [
        _run(number, 1.0, kind, size, memory=factor)
        for number, (kind, size, factor) in enumerate(seen)
    ]
    for kind, size, factor in seen:
        safe = learn(_curve(kind), runs).device_memory_bytes(size)
        assert safe >= factor * _curve(kind).memory_bytes(size) * (1 - 1e-9)


def test_other_models_measurements_never_lower_the_memory_due_to_a_models_size() -> None:
    took = 1 + 4e8 / _curve().memory_bytes(32)
    large = _curve("lstm").model_copy(update={"process_bytes": 7.4e9, "kept_bytes": 7e9})
    assert learn(large, [_run(1, 1.0, memory=took)]).process_bytes == pytest.approx(7.4e9)
    kept = 1 + 5e8 / _curve().memory_bytes(32)
    assert learn(large, [_run(1, 1.0, memory=kept, kept_bytes=1e8)]).process_bytes == pytest.approx(
        7.4e9
    )


def test_a_processes_memory_besides_the_step_is_learned_from_runs() -> None:
    process = 3e8
    took = [1 + process / _curve().memory_bytes(32)] * 3
    learned = learn(
        _curve("lstm"), [_run(number, 1.0, memory=memory) for number, memory in enumerate(took)]
    )
    assert learned.process_bytes == pytest.approx(process)
    assert learned.memory_bytes(32) == _curve().memory_bytes(32)


def test_energy_follows_from_the_learned_time_and_power_is_not_learned() -> None:
    document = _run(1, 1.5).model_dump(mode="json")
    document["findings"][0]["power_w"] = 25.0
    before, learned = _curve(), learn(_curve(), [FinishedRun.model_validate(document)])
    assert (learned.load_w, learned.energy_source) == (before.load_w, before.energy_source)
    energy = [
        estimate_step(one, 32)["energy_j"]["median"] / one.step_time(32).median
        for one in (before, learned)
    ]
    assert learned.step_time(32).median > before.step_time(32).median
    assert energy[1] == pytest.approx(energy[0])


def test_the_devices_of_one_run_count_as_one_run() -> None:
    one, two = _run(1, 1.2), _run(2, 1.1)
    both = one.model_copy(update={"findings": one.findings + two.findings})
    assert learn(_curve(), [both]).learned_from == 1
    assert learn(_curve(), [one, two]).learned_from == 2


def test_the_calibrations_own_prediction_is_kept_beside_the_corrected_one() -> None:
    learned = learn(_curve(), [_run(1, 1.5, memory=1.2)])
    assert learned.calibrated_time_knots == _curve().time_knots
    assert DeviceCurve.model_validate_json(learned.model_dump_json()) == learned
