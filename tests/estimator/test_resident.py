"""Resident memory by playing recorded allocations."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.memory import safe_bytes
from trainwright.estimator.resident import Ended, Lives, Made, Ran, resident_bytes, resident_curves
from trainwright.estimator.source import BatchSpec, ModelDefinition
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace import trace
from trainwright.estimator.training_step import StepSpec

_MIB = 2**20


def _lives(sizes: list[float]) -> Lives:
    """Tensors that are made one after the other and end in the order that they were made."""
    made = [event for number, size in enumerate(sizes) for event in (Made(number + 1, size), Ran("elementwise"))]
    step = [*made, *(Ended(number + 1) for number in range(len(sizes)))]
    return Lives([Made(0, 1000.0)], step, step)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(0, 40 * _MIB), min_size=1, max_size=12), st.integers(0, 9))
def test_what_is_alive_is_resident_and_the_same_start_gives_the_same(sizes: list[float], start: int) -> None:
    lives = _lives(sizes)
    assert resident_bytes(lives, start) >= sum(int(size) for size in sizes)
    assert resident_bytes(lives, start) == resident_bytes(lives, start)


def test_gradients_that_each_step_ends_and_makes_anew_do_not_pile_up() -> None:
    later = [Ended(1), Made(2, 40.0 * _MIB), Ran("elementwise", forward=False)]
    lives = Lives([], [Made(1, 40.0 * _MIB), Ran("elementwise", forward=False)], later)
    assert resident_bytes(lives, 0) < 60 * _MIB


def test_the_curve_goes_by_the_lines_through_both_batch_sizes() -> None:
    middle, most = resident_curves(_lives([40.0 * _MIB]), _lives([80.0 * _MIB]), 8)
    assert 40 * _MIB <= middle(8) < 42 * _MIB
    assert 320 * _MIB <= middle(64) < 322 * _MIB
    assert all(most(size) >= middle(size) for size in (1, 4, 8, 16, 64))


def _structure() -> Structure:
    import torch

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 500), torch.nn.GELU(), torch.nn.Linear(500, 2))

    spec = BatchSpec(
        inputs={"x": (4,)},
        input_dtypes={"x": "float32"},
        target_dtype="int64",
        classes=2,
        task="tabular-classification",
    )
    definition = ModelDefinition(lambda **_: build(), None, None)
    return trace(StepSpec(definition, {}, spec, {"name": "adamw"}), 64)


def test_a_traced_model_knows_what_its_heap_holds_and_one_stored_without_it_is_still_bounded() -> None:
    structure = _structure()
    assert structure.resident_bytes is not None
    assert safe_bytes(structure, 64) > structure.peak_bytes(64)
    stored = structure.model_copy(update={"resident_bytes": None, "most_resident_bytes": None})
    assert safe_bytes(stored, 64) > structure.peak_bytes(64)
    assert Structure.model_validate_json(structure.model_dump_json()) == structure
