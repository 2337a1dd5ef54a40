"""The learning rate chosen from a ramp lies within it for any curve, and trains real data."""

from __future__ import annotations

import itertools
import math
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.search_lr.learning_rate import (
    LADDERS,
    STEPS,
    choose,
    ladder,
)
from trainwright.tasks.search_lr.plot import plot
from trainwright.tasks.train.worker.lr_curve import SMOOTHING, smooth

RATES = ladder(1e-5, 1.0, STEPS)
Points = list[tuple[float, float, float | None]]


def ramp(
    noise: float = 0.0, *, seed: int = 0, start: float = 1e-4, end: float = 3e-2, gone: float = 0.1
) -> Points:
    """A loss that falls from 2.3 to 0.5 between start and end, and rises from `gone` on."""
    chance = random.Random(seed)
    points: Points = []
    for rate in RATES:
        done = min(1.0, max(0.0, math.log10(rate / start) / math.log10(end / start)))
        loss = 2.3 - 1.8 * done + (20 * math.log10(rate / gone) ** 2 if rate > gone else 0.0)
        points.append((rate, loss + chance.gauss(0, noise), 0.1 + 0.8 * done))
    return points


def within(search: LearningRateSearch, rates: list[float]) -> bool:
    """Whether the choice lies in the interval and the interval in the ramp, up to rounding."""
    marks = [rates[0], search.interval[0], search.learning_rate, search.interval[1], rates[-1]]
    return all(before <= after * (1 + 1e-9) for before, after in itertools.pairwise(marks))


def test_the_ladder_rises_by_a_constant_factor() -> None:
    rates = ladder(1e-5, 1.0, 90)
    assert (len(rates), rates[0]) == (90, 1e-5)
    assert rates[-1] == pytest.approx(1.0)
    assert [b / a for a, b in itertools.pairwise(rates)] == pytest.approx([10 ** (5 / 89)] * 89)


def test_smoothing_is_unbiased_at_the_start_and_follows_the_recurrence() -> None:
    assert smooth([3.0] * 20) == pytest.approx([3.0] * 20)
    assert smooth([1.0, 2.0]) == pytest.approx([1.0, (SMOOTHING + 2.0) / (1 + SMOOTHING)])


def test_the_interval_lies_between_the_rates_at_which_the_loss_falls_and_diverges() -> None:
    search = choose(ramp())
    low, high = search.interval
    assert 1e-4 <= low < search.learning_rate < high <= 0.1
    assert search.learning_rate == pytest.approx(math.sqrt(low * high))
    assert search.diverged_at is not None
    assert high < search.diverged_at
    assert f"{search.learning_rate:.2g}" in search.reason


def test_polynomials_and_logarithms_are_fitted_to_loss_and_accuracy() -> None:
    fits = {(fit.curve, fit.kind): fit for fit in choose(ramp()).fits}
    assert set(fits) == {
        (curve, kind) for curve in ("loss", "accuracy") for kind in ("polynomial", "logarithmic")
    }
    assert all(fit.r2 > 0.9 for fit in fits.values())
    assert (
        fits["loss", "logarithmic"].coefficients[0]
        < 0
        < fits["accuracy", "logarithmic"].coefficients[0]
    )
    bare = choose([(rate, loss, None) for rate, loss, _ in ramp()])
    assert {fit.curve for fit in bare.fits} == {"loss"}


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_choice_does_not_depend_on_the_units_of_the_loss(scale: float) -> None:
    scaled = choose([(rate, loss * scale, accuracy) for rate, loss, accuracy in ramp()])
    assert scaled.learning_rate == pytest.approx(choose(ramp()).learning_rate, rel=1e-3)


def test_a_constant_loss_gives_the_middle_and_a_reason() -> None:
    search = choose([(rate, 2.3, 0.1) for rate in RATES])
    assert "did not fall" in search.reason
    assert search.fits == []
    assert within(search, RATES)


@pytest.mark.parametrize("first", [1, 3, 5])
def test_a_loss_that_diverges_at_once_gives_a_rate_below_that(first: int) -> None:
    search = choose([(rate, 2.3 if k < first else 1e3 * k, 0.1) for k, rate in enumerate(RATES)])
    assert search.diverged_at is not None
    assert search.learning_rate < search.diverged_at


def test_no_rate_after_a_nan_loss_is_chosen() -> None:
    broken = [
        (rate, loss if k < 40 else math.nan, accuracy)
        for k, (rate, loss, accuracy) in enumerate(ramp())
    ]
    search = choose(broken)
    assert search.learning_rate < RATES[40]
    assert all(math.isfinite(point.loss) for point in search.points)


@pytest.mark.parametrize(
    "points", [[], [(rate, math.nan, None) for rate in RATES], [(1e-5, math.inf, 0.1)]]
)
def test_a_ramp_without_any_finite_loss_fails_and_names_the_way_out(points: Points) -> None:
    with pytest.raises(TrainingFailed, match=r"set train\.learning_rate in the job"):
        choose(points)


_LOSS = st.one_of(
    st.floats(-1e30, 1e30), st.floats(0, 10), st.sampled_from([math.nan, math.inf, -math.inf])
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_LOSS, min_size=1, max_size=STEPS))
def test_for_any_curve_the_choice_lies_in_its_interval_and_that_in_the_ramp(
    losses: list[float],
) -> None:
    points: Points = [(rate, loss, None) for rate, loss in zip(RATES, losses, strict=False)]
    if math.isfinite(losses[0]):
        search = choose(points)
        assert within(search, RATES)
        assert LearningRateSearch.model_validate_json(search.model_dump_json()) == search


@pytest.mark.parametrize(
    "search", [choose(ramp(0.1)), choose([(r, 2.3, None) for r in RATES])], ids=["falls", "flat"]
)
def test_the_plot_opens_offline(search: LearningRateSearch) -> None:
    html = plot(search)
    assert not re.search(r"""<(script|link|img|iframe)[^>]*\b(src|href)\s*=""", html)
    assert "Training loss while the learning rate rises" in html
    assert ("Training accuracy" in html) == bool(search.fits)


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).reshape(-1, 64) / 16, torch.tensor(
        digits.target
    )


def _train(optimizer: str, rates: list[float]) -> Points:
    """A small network on the digits, one step at each rate."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = _digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    kinds = {
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }
    update = kinds[optimizer]()
    points: Points = []
    for rate in rates:
        rows = torch.randint(len(images), (128,))
        outputs = model(images[rows])
        loss = torch.nn.functional.cross_entropy(outputs, labels[rows])
        update.param_groups[0]["lr"] = rate
        update.zero_grad()
        loss.backward()
        update.step()
        points.append(
            (rate, loss.item(), (outputs.argmax(1) == labels[rows]).float().mean().item())
        )
    return points


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_the_rate_found_on_real_digits_trains_a_model_on_them(optimizer: str) -> None:
    found = choose(_train(optimizer, ladder(*LADDERS[optimizer], STEPS))).learning_rate
    last = _train(optimizer, [found] * 150)[-20:]
    assert sum(accuracy or 0.0 for _, _, accuracy in last) / 20 > 0.9


def falling(noise: float = 0.0, seed: int = 0) -> list[tuple[float, float, float | None]]:
    chance = random.Random(seed)
    done = [min(1.0, max(0.0, math.log10(rate / 1e-4) / math.log10(300))) for rate in RATES]
    return [
        (rate, 2.3 - 1.8 * part + chance.gauss(0, noise), None)
        for rate, part in zip(RATES, done, strict=True)
    ]


def test_noise_is_not_mistaken_for_learning() -> None:
    mistaken = 0
    for seed in range(40):
        chance = random.Random(seed)
        mistaken += (
            "did not fall"
            not in choose([(rate, 2.3 + chance.gauss(0, 0.1), None) for rate in RATES]).reason
        )
    assert mistaken <= 4


@pytest.mark.parametrize("seed", range(3))
def test_noise_hardly_changes_the_choice(seed: int) -> None:
    clean, noisy = choose(falling()).learning_rate, choose(falling(0.2, seed)).learning_rate
    assert abs(math.log10(noisy / clean)) < 0.3


def test_a_nan_loss_ends_the_ramp_and_counts_as_divergence() -> None:
    search = choose(
        [(rate, math.nan if k == 60 else loss, None) for k, (rate, loss, _) in enumerate(falling())]
    )
    assert search.diverged_at == RATES[60]
    assert len(search.points) == 60
    assert search.interval[1] <= RATES[59]


def test_a_loss_that_falls_only_at_the_last_step_still_gives_a_rate() -> None:
    search = choose([(rate, -1.0 if k == 7 else 0.0, None) for k, rate in enumerate(RATES[:8])])
    assert RATES[0] <= search.interval[0] <= search.learning_rate <= search.interval[1] <= RATES[7]
