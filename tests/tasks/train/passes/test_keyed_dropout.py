"""Masks of dropout belong to samples: any division of a batch makes the same ones."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainwright.tasks.train.passes import keyed_dropout


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    keyed_dropout.install()
    yield
    keyed_dropout.end_pass()


def run(module: nn.Module, rows: torch.Tensor, begin: int, step: int = 3) -> torch.Tensor:
    """The module's outputs for these samples of the joint batch."""
    keyed_dropout.begin_pass(7, step, begin, len(rows))
    found = module(rows)
    keyed_dropout.end_pass()
    assert isinstance(found, torch.Tensor)
    return found


class Attention(nn.Module):
    """Attention whose heads are rows of the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attend(rows, rows, rows, need_weights=False)[0]
        return found


MODULES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "rows": (nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.7)), (5,)),
    "images": (nn.Dropout(0.5), (3, 4, 4)),
    "channels": (nn.Dropout2d(0.5), (6, 2, 2)),
    "alpha": (nn.AlphaDropout(0.4), (9,)),
    "attention": (Attention(), (4, 8)),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (4, 8)),
}


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(sorted(MODULES)), cuts=st.lists(st.integers(0, 12), max_size=3))
def test_parts_of_a_batch_have_the_masks_of_the_whole(name: str, cuts: list[int]) -> None:
    module, shape = MODULES[name]
    module.train()
    rows = torch.randn((12, *shape), generator=torch.Generator().manual_seed(0))
    whole = run(module, rows, 0)
    ends = [0, *sorted(cuts), 12]
    parts = [
        run(module, rows[begin:end], begin)
        for begin, end in itertools.pairwise(ends)
        if end > begin
    ]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-6)


def test_masks_differ_between_samples_steps_calls_and_seeds() -> None:
    ones = torch.ones(4, 1000)
    first = run(nn.Dropout(0.5), ones, 0)
    assert len({tuple(row.tolist()) for row in first}) == 4
    assert not torch.equal(first, run(nn.Dropout(0.5), ones, 0, step=4))
    twice = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    assert ((run(twice, ones, 0) > 0).float().mean() - 0.25).abs() < 0.03
    keyed_dropout.begin_pass(8, 3, 0, 4)
    assert not torch.equal(first, functional.dropout(ones, 0.5))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_mean_stays_and_the_share_that_is_dropped_is_p(p: float) -> None:
    found = run(nn.Dropout(p), torch.ones(64, 2000), 0)
    assert abs(float((found == 0).float().mean()) - p) < 0.01
    assert abs(float(found.mean()) - 1) < 0.05


def test_recomputed_activations_get_the_same_masks() -> None:
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    rows = torch.randn(8, 6, requires_grad=True)

    def gradient(*, again: bool) -> torch.Tensor:
        rows.grad = None
        torch.manual_seed(1)
        keyed_dropout.begin_pass(7, 3, 0, 8)
        found = checkpoint(layer, rows, use_reentrant=False) if again else layer(rows)
        found.square().sum().backward()
        assert rows.grad is not None
        return rows.grad.clone()

    assert torch.equal(gradient(again=True), gradient(again=False))


def test_without_a_pass_and_in_evaluation_it_is_torchs() -> None:
    rows = torch.ones(3, 100)
    torch.manual_seed(5)
    one = functional.dropout(rows, 0.5)
    torch.manual_seed(5)
    assert torch.equal(one, torch.dropout(rows, 0.5, True))
    assert torch.equal(run(nn.Dropout(0.5).eval(), rows, 0), rows)
    # A first dimension that is not of samples: a mask of torch's.
    keyed_dropout.begin_pass(7, 3, 0, 2)
    assert functional.dropout(rows, 0.5).shape == rows.shape


def test_a_backward_pass_in_another_thread_makes_the_same_masks() -> None:
    keyed_dropout.begin_pass(7, 3, 0, 4)
    found = []
    rows = torch.ones(4, 64, requires_grad=True)
    block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    outputs = checkpoint(block, rows, use_reentrant=False)  # computed again in the backward pass
    found.append(outputs.detach())
    # As torch does for tensors on a GPU.
    thread = threading.Thread(target=lambda: outputs.sum().backward())
    thread.start()
    thread.join()
    kept = (found[0] != 0).float() @ block[0].weight * 2
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, kept)


@given(
    key=st.tuples(st.integers(0, 2**63), st.integers(0, 2**63)),
    first=st.integers(0, 2**40),
    blocks=st.integers(1, 5),
)
def test_a_device_makes_the_words_that_numpy_makes(
    key: tuple[int, int], first: int, blocks: int
) -> None:
    generator = np.random.Philox(key=key)
    generator.advance(first)
    made = keyed_dropout.philox(key, first, blocks, torch.device("cpu"))
    assert made.numpy().view(np.uint64).tolist() == generator.random_raw(4 * blocks).tolist()


def test_a_pass_that_begins_amid_the_model_continues_the_numbers_of_dropouts() -> None:
    first, second, rows = nn.Dropout(0.5), nn.Dropout(0.5), torch.ones(4, 9)
    whole = run(nn.Sequential(first, nn.Tanh(), second), rows, 2)
    keyed_dropout.begin_pass(7, 3, 2, 4)
    sent = torch.tanh(first(rows))
    keyed_dropout.begin_pass(7, 3, 2, 4, first_call=1)
    assert torch.equal(second(sent), whole)


def test_dropouts_keep_their_numbers_if_one_is_not_over_samples() -> None:
    """As the dropouts of a sequence whose first dimension is of times."""
    drop, rows = nn.Dropout(0.5), torch.ones(3, 9)
    masks = []
    for times in (6, 7):  # 6 could be of 3 samples
        keyed_dropout.begin_pass(7, 3, 0, 3)
        drop(torch.ones(times, 2))
        masks.append(drop(rows))
    assert torch.equal(*masks)


def test_masks_stay_those_of_earlier_versions() -> None:
    keyed_dropout.begin_pass(seed=7, step=3, begin=5, samples=2)
    mask = functional.dropout(torch.ones(2, 32), 0.5)
    keyed_dropout.end_pass()
    bits = ["".join("1" if value else "0" for value in row) for row in mask.tolist()]
    assert [f"{int(row, 2):08x}" for row in bits] == ["2cf5f289", "df025904"]


@given(st.integers(1, 65535), st.integers(0, 2**40), st.integers(1, 5))
def test_a_device_makes_the_masks_that_numpy_makes(least: int, first: int, rows: int) -> None:
    generator = np.random.Philox(key=(7 << 20, 3))
    generator.advance(first)
    values = generator.random_raw(8 * rows).view(np.uint16).reshape(rows, 32)
    words = keyed_dropout.philox((7 << 20, 3), first, 2 * rows, torch.device("cpu"))
    kept = keyed_dropout.at_least(words.view(rows, 8), least)
    assert kept.tolist() == (values >= least).tolist()


def test_a_resumed_pass_recomputes_its_own_masks() -> None:
    """As in a pipeline, whose backward passes begin after later forward passes."""
    model = nn.Sequential(nn.Linear(9, 9), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    parts = torch.randn(2, 4, 9)

    def gradients(*, together: bool) -> list[torch.Tensor]:
        kept, found = [], []
        for number, part in enumerate(parts):
            begun = keyed_dropout.begin_pass(7, 3, 4 * number, 4, first_call=5)
            out = checkpoint(model, part, use_reentrant=False)
            kept.append((begun, out))
            if not together:
                found += torch.autograd.grad(out.sum(), model[0].weight)
        for begun, out in kept if together else ():
            keyed_dropout.resume(begun)
            found += torch.autograd.grad(out.sum(), model[0].weight)
        return found

    torch.manual_seed(1)
    alone = gradients(together=False)
    torch.manual_seed(1)
    for one, two in zip(alone, gradients(together=True), strict=True):
        assert torch.equal(one, two)
