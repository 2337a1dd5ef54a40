"""Where a model can be cut, and the words for what can't be."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from trainwright.estimator.trace.cuts.model_cuts import CutModel, cut


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


_doubled = _Doubled.apply


def _autocast(x, module):
    with torch.autocast("cpu", torch.bfloat16):
        return module.two(x).float()


def _attribute(x, module):
    module.count = module.count + 1
    return x


def _saved(x, module):
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
        return x * 2


def _gradient(x, module):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return x + torch.autograd.grad(y.square().sum(), y)[0]


def _hooked(x, module):
    x.register_hook(lambda one: 2 * one) if x.requires_grad else None
    return x


REFUSED: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "if": (lambda x, _: 2 * x if x.sum() > 0 else x, "uses bool() of a tensor"),
    "item": (lambda x, _: x * x.mean().item(), "uses item() of a tensor"),
    "tolist": (lambda x, _: x * len(set(x.sum(1).tolist())), "uses tolist() of a tensor"),
    "numpy": (lambda x, _: x + float(x.detach().numpy().mean()), "calls numpy()"),
    "size of a selection": (
        lambda x, _: x / max(1, len(x[x > 0])),
        "uses a size that depends on values",
    ),
    "attribute": (_attribute, "sets an attribute of a module"),
    "random": (
        lambda x, _: 2 * x if random.random() < 0.5 else x,
        "draws random numbers of Python",
    ),
    "numpy's random": (
        lambda x, _: x * np.random.rand(),
        "draws random numbers of Python or numpy",
    ),
    "large batches": (lambda x, _: 2 * x if len(x) > 100 else x, "makes other calls"),
    "a limit": (lambda x, _: x + x[: min(len(x), 100)].mean(), "passes on 2, which depends"),
    "half a batch": (lambda x, _: x + x[: len(x) // 2].sum(), "passes on 1, which depends"),
    "a root": (lambda x, _: x * len(x) ** -0.5, "which depends on the number of samples"),
    "autocast": (_autocast, "computes in a mode of its own"),
    "gradients": (_gradient, "calls grad() in its forward pass"),
    "hook of a tensor": (_hooked, "calls register_hook()"),
    "saved tensors": (_saved, "leave recomputation to the plan"),
    "checkpoint": (
        lambda x, module: checkpoint(module.two, x, use_reentrant=False),
        "leave recomputation to the plan",
    ),
    "own function": (lambda x, _: _doubled(x), "calls an autograd.Function"),
    "vmap": (lambda x, _: torch.vmap(lambda row: 2 * row)(x), "comes neither from its inputs"),
    "other layers": (
        lambda x, module: module.three(x) if module.training else x,
        "runs other layers in training than in evaluation",
    ),
}


class Part(nn.Module):
    """Code between two layers."""

    def __init__(self, code: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.code, self.count = code, 0

    def forward(self, x):
        return self.two(self.code(self.one(x), self))


class Around(nn.Module):
    """A part between two layers."""

    def __init__(self, code: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), Part(code), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.part(self.first(x)))


def rows(samples: int) -> torch.Tensor:
    return torch.randn(samples, 4)


def names(found: CutModel) -> list[str]:
    assert found.not_cut == ""
    return [one.name for one in found.units]


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_cant_be_repeated_runs_whole_and_is_named_if_it_is_the_models(name: str) -> None:
    code, says = REFUSED[name]
    found = cut(lambda: Part(code), rows)
    assert found.units == ()
    assert found.not_cut.startswith("Part ")
    assert says in found.not_cut
    assert names(cut(lambda: Around(code), rows)) == ["first", "part", "last"]


def test_the_reason_names_the_line() -> None:
    assert "test_model_cuts.py, line " in cut(lambda: Part(REFUSED["if"][0]), rows).not_cut


REPEATED: dict[str, Callable[..., torch.Tensor]] = {
    "a module made on the way": lambda x, _: nn.ReLU()(x),
    "samples as a factor": lambda x, _: x / len(x),
    "sizes": lambda x, _: x.view(x.shape[0] * 2, -1).reshape(len(x), -1),
    "made tensors": lambda x, _: x + torch.arange(x.shape[1]) * torch.zeros(len(x), 1),
    "a check of the width": lambda x, _: x if x.shape[1] == 4 else x[:, :4],
    "own function": lambda x, _: _Doubled.apply(x),
    "no gradients": lambda x, _: x + x.detach(),
    "assignment": lambda x, _: x.clone().index_fill_(1, torch.tensor([0]), 1.0),
}


@pytest.mark.parametrize("name", REPEATED)
def test_code_of_functions_is_opened(name: str) -> None:
    found = cut(lambda: Around(REPEATED[name]), rows)
    assert names(found) == ["first", "part.one", "part.two", "last"]


def test_the_model_itself_may_have_no_hooks() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.register_forward_hook(lambda module, args, out: 2 * out)
        return model

    assert "Sequential has hooks" in cut(build, rows).not_cut


def test_a_model_that_raises_is_not_cut_and_says_what_it_raised() -> None:
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("no such day")

    assert "its forward pass raised ValueError: no such day (" in cut(Broken, rows).not_cut
    assert "building it raised ZeroDivisionError" in cut(lambda: 1 / 0, rows).not_cut  # type: ignore[arg-type,return-value]


def test_one_layer_can_not_be_cut() -> None:
    found = cut(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), rows)
    assert found.not_cut == "it has no two layers between which it could be cut"


def test_a_model_is_cut_after_what_makes_the_fewest_bytes() -> None:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            return self.two(functional.max_pool2d(torch.relu(self.one(x)), 4))

    found = cut(Convolutions, lambda samples: torch.zeros(samples, 1, 8, 8))
    assert found.units[0].crossing_bytes(5) == 5 * 8 * 2 * 2 * 4
    assert found.units[0].crossing_bytes.fixed == 0


def test_a_norm_that_is_used_twice_stays_in_one_unit() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.three(self.norm(self.two(self.norm(self.one(x)))))

    found = cut(Shared, rows)
    assert names(found) == ["one", "norm", "three"]
    assert found.units[1].modules == ["norm", "two"]
    assert [one.batch_statistics for one in found.units] == [False, True, False]


def test_a_module_that_reads_what_another_left_behind_is_not_cut_from_it() -> None:
    class Reader(nn.Module):
        def __init__(self, source: nn.Module) -> None:
            super().__init__()
            self.layer, self.source, self.count = nn.Linear(4, 4), [source], 0

        def forward(self, x):
            self.count = self.count + 1
            return self.layer(x) + self.source[0].inner

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.inner = nn.Linear(4, 4), None

        def forward(self, x):
            self.inner = self.layer(x)
            return torch.tanh(self.inner)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.writer, self.middle = nn.Linear(4, 4), Writer(), nn.Linear(4, 4)
            self.reader, self.last = Reader(self.writer), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.reader(self.middle(self.writer(self.first(x)))))

    found = cut(Both, rows)
    assert names(found) == ["first", "writer", "last"]
    assert found.units[1].modules == ["writer", "middle", "reader"]


class Packed(nn.Module):
    """A recurrent layer over sequences of their own lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True)

    def forward(self, tokens):
        lengths = (tokens > 0).sum(1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        found, _ = nn.utils.rnn.pad_packed_sequence(
            self.gru(packed)[0], batch_first=True, total_length=tokens.shape[1]
        )
        return found


def test_code_that_packs_sequences_runs_whole() -> None:
    def tokens(samples: int) -> torch.Tensor:
        return torch.zeros(samples, 6, dtype=torch.int64)

    assert "uses a size that depends on values" in cut(Packed, tokens).not_cut
    found = cut(lambda: nn.Sequential(Packed(), nn.Linear(4, 4), nn.Linear(4, 4)), tokens)
    assert names(found) == ["0", "1", "2"]


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bidirectional": True}], ids=str)
def test_results_of_recurrent_layers_are_described_as_they_are(
    kind: type[nn.RNNBase], options: dict[str, bool]
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), kind(4, 5, num_layers=2, **options))

    def batch(samples: int) -> torch.Tensor:
        return torch.zeros((samples, 7, 3) if options else (7, samples, 3))

    graph = cut(build, batch).graphs[True]
    made = tree_leaves(build()(batch(4)))
    for facts, one in zip(map(graph.facts.get, graph.outputs.refs()), made, strict=True):
        assert facts is not None
        assert facts.shape_of(4) == one.shape
        assert (facts.dtype, facts.gradient) == (one.dtype, one.requires_grad)
        strides = [one.stride()[place] for place in facts.order]
        assert strides == sorted(strides, reverse=True)


def test_cutting_leaves_random_numbers_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    cut(lambda: Around(REFUSED["if"][0]), rows)
    assert torch.equal(torch.rand(2), expected)
