"""The gradient noise scale: unbiased for any split, on a known model and on a real one."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.tasks.train.batch.half_batches import half_squares
from trainwright.tasks.train.batch.noise_scale import LEAST_ESTIMATES, NoiseScale, noise_and_signal

SPLITS = st.lists(st.integers(1, 40), min_size=2, max_size=5)


def drawn(
    rng: np.random.Generator, split: list[int], mean: np.ndarray, deviation: np.ndarray
) -> tuple[float, float]:
    """One step's estimates from normally distributed gradients of single samples."""
    own = [mean + rng.normal(size=len(mean)) * deviation / math.sqrt(batch) for batch in split]
    joint = sum(batch * gradient for batch, gradient in zip(split, own, strict=True)) / sum(split)
    return noise_and_signal(split, [float(one @ one) for one in own], float(joint @ joint))


@settings(max_examples=25, deadline=None)
@given(split=SPLITS, seed=st.integers(0, 2**31 - 1), size=st.floats(0.05, 3.0))
def test_both_estimates_are_unbiased_for_any_split(
    split: list[int], seed: int, size: float
) -> None:
    rng = np.random.default_rng(seed)
    mean, deviation = size * rng.normal(size=30), rng.random(30) + 0.1
    estimates = np.array([drawn(rng, split, mean, deviation) for _ in range(1500)])
    expected = np.array([float(deviation @ deviation), float(mean @ mean)])
    error = estimates.std(axis=0) / math.sqrt(len(estimates))
    assert (np.abs(estimates.mean(axis=0) - expected) < 6 * error).all()


def test_the_estimate_is_unbiased_for_very_unequal_batches() -> None:
    rng = np.random.default_rng(0)
    mean, deviation = np.full(20, 0.2), np.ones(20)
    noise = [drawn(rng, [30, 2], mean, deviation)[0] for _ in range(4000)]
    assert np.mean(noise) == pytest.approx(20, rel=0.05)


@given(split=SPLITS, squares=st.data())
def test_equal_gradients_give_zero_noise(split: list[int], squares: st.DataObject) -> None:
    square = squares.draw(st.floats(1e-3, 1e3))
    noise, signal = noise_and_signal(split, [square] * len(split), square)
    assert noise == pytest.approx(0, abs=1e-9 * square * sum(split))
    assert signal == pytest.approx(square)


@pytest.mark.parametrize("split", [[], [8], [8, 0, 0]])
def test_fewer_than_two_ranks_with_samples_are_refused(split: list[int]) -> None:
    with pytest.raises(ValueError, match="needs at least 2"):
        noise_and_signal(split, [1.0] * len(split), 1.0)


def test_the_smoothed_scale_is_none_at_first_and_then_tends_to_the_true_scale() -> None:
    rng, scale = np.random.default_rng(1), NoiseScale()
    mean, deviation = np.full(400, 0.1), np.ones(400)
    values = []
    for _ in range(300):
        scale.add(*drawn(rng, [24, 8], mean, deviation))
        values.append(scale.value)
    assert values[: LEAST_ESTIMATES - 1] == [None] * (LEAST_ESTIMATES - 1)
    assert np.mean([value for value in values[100:] if value]) == pytest.approx(400 / 4, rel=0.15)


def test_the_scale_is_infinite_without_signal_and_zero_without_noise() -> None:
    lost, still = NoiseScale(), NoiseScale()
    for _ in range(LEAST_ESTIMATES):
        lost.add(1.0, -0.1)
        still.add(-0.1, 1.0)
    assert (lost.value, still.value) == (math.inf, 0.0)


def test_estimates_that_are_not_finite_are_ignored() -> None:
    scale = NoiseScale()
    scale.add(1.0, 1.0)
    kept = scale.document()
    for bad in (math.nan, math.inf):
        scale.add(bad, 1.0)
        scale.add(1.0, bad)
    assert scale.document() == kept


def test_a_checkpoint_between_begin_and_complete_loses_nothing() -> None:
    direct, interrupted = NoiseScale(), NoiseScale()
    direct.add(*noise_and_signal([3, 1], [2.0, 4.0], 1.5))
    interrupted.begin(3 * 2.0 + 1 * 4.0, 4, 2)
    again = NoiseScale(**json.loads(json.dumps(interrupted.document())))
    again.complete(1.5)
    assert (again.noise, again.signal, again.estimates) == pytest.approx(
        (direct.noise, direct.signal, 1)
    )
    again.complete(99.0)
    assert again.estimates == 1


def _net(norm: bool) -> torch.nn.Module:
    torch.manual_seed(3)
    layers = (
        [torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16)] if norm else [torch.nn.Linear(6, 16)]
    )
    return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def test_two_halves_estimate_the_same_noise_as_gradients_of_single_samples() -> None:
    model = _net(norm=False)
    inputs = torch.randn(600, 6, dtype=torch.float64)
    targets = torch.sin(inputs[:, :1] * 2) + 0.5 * torch.randn(600, 1, dtype=torch.float64)

    def loss_of(rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        # Any weight of a sample, as long as all have the same: sizes count samples.
        return torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows]), 3.0 * len(rows)

    single = torch.stack(
        [
            torch.cat(
                [
                    one.reshape(-1)
                    for one in torch.autograd.grad(
                        loss_of(torch.tensor([row]))[0], list(model.parameters())
                    )
                ]
            )
            for row in range(600)
        ]
    )
    mean = single.mean(0)
    noise, signal = float((single - mean).square().sum(1).mean()), float(mean.square().sum())
    chance = torch.Generator().manual_seed(0)
    found = np.array(
        [
            noise_and_signal(
                *half_squares(model, loss_of, torch.randint(600, (33,), generator=chance))
            )
            for _ in range(600)
        ]
    )
    error = found.std(axis=0) / math.sqrt(len(found))
    assert (np.abs(found.mean(axis=0) - [noise, signal]) < 5 * error).all()
    assert found.mean(axis=0)[0] / found.mean(axis=0)[1] == pytest.approx(noise / signal, rel=0.3)


def test_measuring_with_halves_changes_neither_buffers_nor_gradients() -> None:
    model = _net(norm=True)
    inputs = torch.randn(20, 6, dtype=torch.float64)
    model(inputs).sum().backward()
    before = [one.clone() for one in (*model.buffers(), *(one.grad for one in model.parameters()))]
    half_squares(
        model, lambda rows: (model(inputs[rows]).square().mean(), len(rows)), torch.arange(20)
    )
    after = [*model.buffers(), *(one.grad for one in model.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
