"""The simulation of recomputed modules equals recordings of the model under torch's checkpoint."""

from __future__ import annotations

import functools

import pytest

from tests.estimator.memory.recorded_models import FAMILIES, chain_step, recomputing, step_of
from trainwright.estimator.lifetimes import Lifetimes
from trainwright.estimator.memory.recomputation import StepSimulation
from trainwright.estimator.memory.recompute_names import run_of
from trainwright.estimator.memory.step_memory import peak_bytes
from trainwright.estimator.structure import RecordedStep, Structure
from trainwright.estimator.trace.trace import trace

_BATCH = 16
_CHOICES = [(family, tuple(names)) for family, (_, _, some) in FAMILIES.items() for names in some]


@functools.cache
def _structure(family: str, accumulation: int = 1) -> Structure:
    return trace(step_of(family, accumulation), _BATCH)


def _recorded(family: str, accumulation: int = 1) -> RecordedStep:
    found = _structure(family, accumulation).recorded_step()
    assert found is not None
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [_BATCH, 3, 1024])
def test_nothing_recomputed_is_the_step_as_it_was(family: str, batch_size: int) -> None:
    expected = peak_bytes(_structure(family), batch_size)
    assert StepSimulation(_recorded(family), batch_size).peak_bytes() == pytest.approx(expected)


@pytest.mark.parametrize(("family", "names"), _CHOICES)
def test_the_peak_is_that_of_a_recording_under_torchs_checkpoint(
    family: str, names: tuple[str, ...]
) -> None:
    measured = peak_bytes(trace(recomputing(step_of(family), names), _BATCH), _BATCH)
    predicted = StepSimulation(_recorded(family), _BATCH).peak_bytes(names)
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("runs", [[(0, 4), (4, 8), (8, 12)], [(0, 12)], [(2, 5), (7, 8)]])
def test_modules_that_are_recomputed_together_keep_the_first_ones_arguments(
    runs: list[tuple[int, int]],
) -> None:
    measured = peak_bytes(trace(chain_step(*runs), 256), 256)
    recorded = trace(chain_step(), 256).recorded_step()
    assert recorded is not None
    names = [run_of(f"blocks.{begin}", f"blocks.{end - 1}") for begin, end in runs]
    predicted = StepSimulation(recorded, 256).peak_bytes(names)
    assert predicted == pytest.approx(measured, rel=0.01)


def test_micro_batches_are_recomputed_one_by_one() -> None:
    names = ("blocks.0", "blocks.1", "blocks.2")
    step = recomputing(step_of("transformer", accumulation=2), names)
    measured = peak_bytes(trace(step, _BATCH), _BATCH)
    simulation = StepSimulation(_recorded("transformer", accumulation=2), _BATCH)
    assert simulation.peak_bytes(names) == pytest.approx(measured, rel=0.01)
    assert simulation.peak_bytes(names) < simulation.peak_bytes()


def test_a_module_inside_a_recomputed_one_changes_nothing() -> None:
    simulation = StepSimulation(_recorded("transformer"), _BATCH)
    both = simulation.peak_bytes(("blocks.0", "blocks.0.mlp"))
    assert both == simulation.peak_bytes(("blocks.0",))


def test_a_module_whose_argument_is_overwritten_is_not_recorded_as_one_to_recompute() -> None:
    names = {call.name for call in _recorded("residual").lifetimes.calls}
    assert "blocks.0.second" in names
    assert "blocks.0.last" not in names


def test_a_structure_without_calls_says_nothing_about_recomputing() -> None:
    structure = _structure("recurrent")
    assert structure.lifetimes is not None
    before = structure.lifetimes.model_dump(exclude={"calls", "kept"})
    old = structure.model_copy(update={"lifetimes": Lifetimes.model_validate(before)})
    assert old.recorded_step() is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("calls", [["one", -1, 5, 4, 4, 6, 6, []]], "places of 'one' are not increasing"),
        ("calls", [["one", 0, 1, 2, 2, 3, 3, []]], "places of 'one' are not increasing"),
        ("calls", [["one", -1, 1, 2, 2, 3, 3, [9]]], "'one' is given a storage that is not"),
        ("kept", [[9, 1, []]], "the kept storage 9 names nothing"),
        ("kept", [[0, 1, [[3, 1]]]], "the kept storage 0 names nothing"),
    ],
)
def test_calls_that_name_nothing_are_refused(field: str, value: object, message: str) -> None:
    plain = {"sizes": [{"fixed": 1.0, "per_sample": 0.0}], "start": [0], "step": [0, 0, 0, -1]}
    with pytest.raises(ValueError, match=message):
        Lifetimes.model_validate({**plain, field: value})
