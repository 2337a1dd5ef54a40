"""Losses that are no mean over samples are told, with what mends them; others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from trainwright.estimator.errors import BadInput
from trainwright.estimator.trace.batch_loss import BatchLoss, loss_function
from trainwright.estimator.trace.checked_rows import RealRows
from trainwright.estimator.trace.loss_check import loss_notice
from trainwright.estimator.trace.output_forms import TensorForm
from trainwright.estimator.trace.source import ModelDefinition

_CHANCE = torch.Generator().manual_seed(1)
FULL = torch.randint(1, 5, (64, 12), generator=_CHANCE)
LENGTHS = 1 + torch.randint(12, (64, 1), generator=_CHANCE)
PADDED = FULL.masked_fill(torch.arange(12) >= LENGTHS, -100)
CLASSES = torch.randint(4, (64,), generator=_CHANCE)
NUMBERS = torch.randn(64, 3, generator=_CHANCE)
WEIGHTS = torch.tensor([0.1, 1.0, 3.0, 5.0])


def tokens(outputs: Any, targets: Any) -> Any:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def summed(outputs: Any, targets: Any) -> Any:
    flat = outputs.flatten(0, 1), targets.flatten()
    return functional.cross_entropy(*flat, reduction="sum"), (targets != -100).sum()


def masked(outputs: Any, targets: Any) -> Any:
    each = functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return (each * (targets != 0)).sum() / (targets != 0).sum()


def of_rows(outputs: Any, targets: Any) -> Any:
    each = functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return (each.sum(1) / (targets != -100).sum(1)).mean()


def contrastive(outputs: Any, targets: Any) -> Any:
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def dropped(outputs: Any, targets: Any) -> Any:
    return functional.cross_entropy(functional.dropout(outputs, 0.5), targets)


TOKENS, SCORES = (12, 5), (4,)
Case = tuple[Callable[[Any, Any], Any], tuple[int, ...], torch.Tensor]
RIGHT: dict[str, Case] = {
    "samples": (functional.cross_entropy, SCORES, CLASSES),
    "rows of tokens": (of_rows, TOKENS, PADDED),
    "nothing is left out": (tokens, TOKENS, FULL),
    "a pair": (summed, TOKENS, PADDED),
    "random numbers": (dropped, SCORES, CLASSES),
    "probabilities": (
        lambda outputs, targets: functional.binary_cross_entropy(outputs, targets.to(outputs)),
        (3,),
        (NUMBERS > 1).long(),
    ),
}
TOLD: dict[str, tuple[Case, str]] = {
    "tokens": (
        (tokens, TOKENS, PADDED),
        "add to the model's source: def loss_weight(targets): return (targets != -100).sum()",
    ),
    "a mask": (
        (masked, TOKENS, PADDED.clamp(min=0)),
        "add to the model's source: def loss_weight(targets): return (targets != 0).sum()",
    ),
    "weights of classes": (
        (lambda *given: functional.cross_entropy(*given, WEIGHTS), SCORES, CLASSES),
        "; return a pair (sum, weight) from loss",
    ),
    "a sum": (
        (lambda *given: functional.mse_loss(*given, reduction="sum"), (3,), NUMBERS),
        "it is a sum; ",
    ),
    "negatives in the batch": ((contrastive, (16,), CLASSES), "depends on other samples"),
    "a root": (
        (lambda *given: functional.mse_loss(*given).sqrt(), (3,), NUMBERS),
        "depends on other samples",
    ),
}


def notice(case: Case, weight_of: Callable[[Any], Any] | None = None) -> str:
    loss, shape, targets = case
    forms = [(count, TensorForm((count, *shape), torch.float32)) for count in (4, 8)]
    return loss_notice(BatchLoss(loss, weight_of, own=True), *forms, RealRows(targets))


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_of_a_mean_that_ranks_join(name: str) -> None:
    assert notice(RIGHT[name]) == ""


@pytest.mark.parametrize("name", TOLD)
def test_another_loss_is_told_with_what_mends_it(name: str) -> None:
    case, expected = TOLD[name]
    found = notice(case)
    assert "it is no mean over samples; " in found
    assert expected in found
    assert "\n" not in found


def test_the_given_weight_is_compared_too() -> None:
    case, _ = TOLD["tokens"]
    assert notice(case, lambda targets: (targets != -100).sum()) == ""
    assert "its weight is not what it is divided by" in notice(
        case, lambda targets: (targets == 1).sum()
    )


class ModelWithLoss(torch.nn.Module):
    """Its output is its mean loss over tokens, or over samples."""

    def __init__(self, *, over_tokens: bool) -> None:
        super().__init__()
        self.over_tokens = over_tokens
        self.body = torch.nn.Sequential(torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.5))
        self.out = torch.nn.Linear(12, 12 * 5)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        tags = inputs["tags"]
        outputs = self.out(self.body(tags.float())).unflatten(1, (12, 5))
        found: torch.Tensor = (tokens if self.over_tokens else of_rows)(outputs, tags)
        return found


@pytest.mark.parametrize("over_tokens", [True, False])
def test_the_loss_that_a_model_returns_is_checked_too(*, over_tokens: bool) -> None:
    forms = [(count, TensorForm((), torch.float32)) for count in (4, 8)]
    rows = RealRows(PADDED, {"tags": PADDED})
    found = loss_notice(
        BatchLoss(lambda outputs, targets: outputs, own=True),
        *forms,
        rows,
        lambda: ModelWithLoss(over_tokens=over_tokens),
    )
    assert found.endswith(": return (targets != -100).sum()") is over_tokens
    assert bool(found) is over_tokens


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        ({"loss": lambda *_: (torch.ones(()), -1.0)}, "its weight is -1; allowed: a finite number"),
        (
            {"loss": lambda *_: (torch.ones(()), torch.ones(2))},
            "its weight is a tensor of 2",
        ),
        ({"loss": lambda *_: (1.0, 2.0)}, "returned float; allowed: a scalar tensor, the mean"),
        ({"loss": lambda *_: (torch.ones(()),) * 3}, "returned 3 values; allowed: "),
        (
            {"loss": lambda *_: (torch.ones(()), 1), "loss_weight": len},
            "returned a pair, and the model's source has loss_weight too",
        ),
        ({"loss": None, "loss_weight": len}, r"defines loss_weight\(targets\), but no loss"),
    ],
)
def test_a_loss_of_another_form_is_bad_input(definition: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        loss_function(
            ModelDefinition(lambda: None, None, **definition), "tabular-classification"
        ).weighted(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 2)


def test_cross_entropy_counts_the_targets_that_it_does_not_ignore() -> None:
    loss = loss_function(ModelDefinition(lambda: None, None, None), "image-classification")
    targets = torch.tensor([0, -100, 2, 1])
    assert loss.weighted(torch.zeros(4, 3), targets, 4)[1] == 3
    assert loss.weighted(torch.zeros(4, 3), torch.full((4, 3), 1 / 3), 4)[1] == 4
