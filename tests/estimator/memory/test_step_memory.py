"""The laws of predicted memory: expected, safe, and the process."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.curves import Affine, DeviceCurve, Knots
from trainwright.estimator.lifetimes import Lifetimes
from trainwright.estimator.memory.step_memory import (
    PROCESS_BYTES,
    block_bytes,
    code_bytes,
    excess_terms,
    kept_bytes,
    lasting_bytes,
    most_held_bytes,
    peak_bytes,
    rising,
    safe_bytes,
)
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.estimator.structure import Operation, Structure

_SIZES = st.floats(0.0, 1e7)


@st.composite
def _structures(draw: st.DrawFn) -> Structure:
    idle = draw(_SIZES)
    operations = [
        Operation(
            kind=f"aten.kind{place}",
            family="elementwise",
            count=draw(st.integers(1, 5)),
            flops=Affine(fixed=0, per_sample=1),
            bytes=Affine(fixed=0, per_sample=12.0),
            dims={"made": Affine(fixed=0.0, per_sample=draw(_SIZES))},
            live_bytes=Affine(fixed=idle + draw(_SIZES), per_sample=draw(_SIZES)),
        )
        for place in range(draw(st.integers(1, 4)))
    ]
    return Structure(
        batch_size=8,
        optimizer="sgd",
        precision="fp32",
        method="fake tensors",
        parameters=100,
        parameter_bytes=400,
        forward_flops_per_sample=1.0,
        activation_bytes_per_sample=1.0,
        idle_bytes=Affine(fixed=idle, per_sample=0.0),
        peak_memory_bytes=Affine(fixed=idle, per_sample=1.0),
        layers=[],
        features={},
        operations={},
        trace=operations,
    )


@given(_structures(), st.integers(1, 4096))
def test_the_safe_bound_is_never_below_the_expected_memory(
    structure: Structure, batch_size: int
) -> None:
    expected = peak_bytes(structure, batch_size)
    assert safe_bytes(structure, batch_size, expected) >= expected


@settings(deadline=None)  # the first call imports scipy
@given(_structures(), st.lists(st.integers(1, 4096), min_size=2, max_size=6))
def test_a_larger_batch_never_takes_less_memory_in_a_plan(
    structure: Structure, sizes: list[int]
) -> None:
    curve = predict_curve(structure, None, device_type="cpu")
    needed = [curve.device_memory_bytes(size) for size in sorted(sizes)]
    assert needed == sorted(needed)
    assert all(curve.safe_memory_bytes(size) >= curve.memory_bytes(size) for size in sizes)


@settings(deadline=None)
@given(_structures(), st.integers(1, 64))
def test_a_ranks_memory_includes_process_gradient_buffer_and_checkpoint_copies(
    structure: Structure, batch_size: int
) -> None:
    curve = predict_curve(structure, None, device_type="cpu")
    assert curve.process_bytes == PROCESS_BYTES + curve.kept_bytes
    state = max(
        0.0, structure.idle_bytes(0) - structure.parameter_bytes
    )  # parameters, buffers, the optimizer's
    assert curve.kept_bytes == kept_bytes(structure, "cpu") == structure.parameter_bytes + 2 * state
    assert (
        kept_bytes(structure, "nvidia-t4") == structure.parameter_bytes
    )  # copies of a GPU's are the host's
    assert (
        curve.device_memory_bytes(batch_size)
        == curve.safe_memory_bytes(batch_size) + curve.process_bytes
    )


@given(_structures())
def test_memory_alive_between_steps_leaves_no_holes(structure: Structure) -> None:
    idle = peak_bytes(structure, 64) + 1.0
    still = structure.model_copy(update={"idle_bytes": Affine(fixed=idle, per_sample=0.0)})
    assert excess_terms(still, 64, peak_bytes(still, 64))[1] == 0.0


def test_blocks_too_large_for_the_heap_leave_no_holes() -> None:
    structure = Structure(
        batch_size=1,
        optimizer="sgd",
        precision="fp32",
        method="fake tensors",
        parameters=1,
        parameter_bytes=4,
        forward_flops_per_sample=1.0,
        activation_bytes_per_sample=1.0,
        peak_memory_bytes=Affine(fixed=0, per_sample=1.0),
        layers=[],
        features={},
        operations={},
        trace=[
            Operation(
                kind="aten.add",
                family="elementwise",
                count=1,
                flops=Affine(fixed=0, per_sample=1),
                bytes=Affine(fixed=0, per_sample=1),
                dims={"made": Affine(fixed=0, per_sample=2**20)},
                live_bytes=Affine(fixed=0, per_sample=2**23),
            )
        ],
    )
    assert excess_terms(structure, 8, peak_bytes(structure, 8))[1] == 8 * 2**23
    assert excess_terms(structure, 9, peak_bytes(structure, 9))[1] == 0.0


@given(st.lists(st.floats(0, 1e12)))
def test_rising_never_falls_and_is_never_below_its_input(values: list[float]) -> None:
    risen = rising(values)
    assert risen == sorted(risen)
    assert all(high >= value for high, value in zip(risen, values, strict=True))


def test_a_stored_curve_without_a_safe_curve_is_read_with_its_factor() -> None:
    stored = DeviceCurve(
        device_type="cpu",
        mode="datasheet",
        coverage=0.0,
        step_time_s=Affine(fixed=1, per_sample=1),
        low_factor=0.5,
        high_factor=2.0,
        peak_memory_bytes=Affine(fixed=100.0, per_sample=1.0),
        memory_safe_factor=1.25,
    )
    assert stored.device_memory_bytes(20) == pytest.approx(150.0)
    known = stored.model_copy(
        update={"safe_memory_knots": Knots(sizes=(1, 20), values=(110.0, 200.0))}
    )
    assert known.safe_memory_bytes(20) == pytest.approx(200.0)


def _played() -> Structure:
    """Activations of 1 MiB per sample that live until the backward pass; 8 MiB of parameters."""
    lifetimes = Lifetimes(
        sizes=(Affine(fixed=2**23, per_sample=0.0), Affine(fixed=0.0, per_sample=2**20)),
        start=(0, 1, 1, 1, -4, -3, -2),
        step=(1, 1, 1, -7, -6, -5),
        graphs=((1, 4, 7), (7, 10, 13)),
    )
    made = Structure(
        batch_size=8,
        optimizer="sgd",
        precision="fp32",
        method="fake tensors",
        parameters=2**21,
        parameter_bytes=2**23,
        forward_flops_per_sample=1.0,
        activation_bytes_per_sample=3.0 * 2**20,
        peak_memory_bytes=Affine(fixed=2**23, per_sample=3.0 * 2**20),
        layers=[],
        features={},
        operations={},
        trace=[
            Operation(
                kind="aten.add",
                family="elementwise",
                count=3,
                flops=Affine(fixed=0, per_sample=1),
                bytes=Affine(fixed=0, per_sample=2**21),
                live_bytes=Affine(fixed=2**23, per_sample=3.0 * 2**20),
            )
        ],
        lifetimes=lifetimes,
    )
    return made.model_copy(update={"most_held_bytes": most_held_bytes(made)})


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100, 4096, 10_000])
def test_held_memory_is_simulated_at_several_batch_sizes_and_stored_in_the_structure(
    batch_size: int,
) -> None:
    structure = _played()
    kept = Structure.model_validate_json(structure.model_dump_json())
    assert kept.most_held_bytes is not None
    expected = peak_bytes(structure, batch_size)
    assert expected - 2**20 <= kept.most_held_bytes(batch_size) < 2.5 * expected
    assert expected < safe_bytes(kept, batch_size, expected) < 3 * expected + 2**24


def test_the_largest_block_is_the_largest_unmapped_one() -> None:
    structure = _played()
    assert [block_bytes(structure, size) for size in (1, 20, 32, 33)] == [
        2**23,
        20 * 2**20,
        2**25,
        2**23,
    ]
    assert block_bytes(structure.model_copy(update={"lifetimes": None}), 8) == 0.0


def test_the_bound_has_terms_for_code_held_memory_and_the_largest_block() -> None:
    structure = _played()
    assert structure.most_held_bytes is not None
    convolution = structure.trace[0].model_copy(update={"kind": "aten.convolution"})
    both = structure.model_copy(update={"trace": [*structure.trace, convolution]})
    assert code_bytes(both) > code_bytes(structure) > 0
    assert code_bytes(both.model_copy(update={"trace": [*both.trace, convolution]})) == code_bytes(
        both
    )
    expected = peak_bytes(structure, 8)
    more = safe_bytes(both, 8, expected) - safe_bytes(structure, 8, expected)
    assert more >= code_bytes(both) - code_bytes(structure)
    counted = code_bytes(structure) + structure.most_held_bytes(8) + 0.1 * block_bytes(structure, 8)
    assert safe_bytes(structure, 8, expected) > counted


def test_a_structure_without_simulation_has_a_bound_from_its_operations_sizes() -> None:
    document = _played().model_dump(mode="json")
    document["held_bytes"] = document.pop("most_held_bytes")
    del document["lifetimes"]["graphs"]
    stored = Structure.model_validate(document)
    expected = peak_bytes(stored, 8)
    assert safe_bytes(stored, 8, expected) > expected
    assert most_held_bytes(stored.model_copy(update={"lifetimes": None})) is None


@given(_structures(), st.sampled_from(["conv", "conv_backward", "matmul"]))
def test_each_prepared_operation_leaves_memory_behind(structure: Structure, family: str) -> None:
    one = structure.trace[0].model_copy(update={"family": family})
    more = structure.model_copy(update={"trace": [*structure.trace, one]})
    assert lasting_bytes(more) > lasting_bytes(structure) > 0
