"""Recomputed modules change nothing: parameters and buffers are the same to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, source_of
from layout_ranks import layers_of, structure_of, train_in_threads, with_layout
from test_exactness import state
from training_case import request

from trainwright.estimator.memory.recompute_names import run_of
from trainwright.tasks.allocate.layouts.permitted import require_permitted
from trainwright.tasks.errors import BadInput
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.passes.recomputed import recompute
from trainwright.tasks.train.rank.rank import Rank

_OWN_NORM = """
import torch
from torch import nn


class Drifting(nn.Module):
    \"\"\"Its output depends on a buffer that every forward pass changes.\"\"\"

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.inner = nn.Linear(64, 32)
        self.noise = nn.Dropout(0.3)

    def forward(self, images):
        self.seen += 1
        return torch.tanh(self.noise(self.inner(images)) * (1 + self.seen / 100))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.out = Drifting(), nn.Linear(32, 10)

    def forward(self, images):
        return self.out(self.first(images.flatten(1)) + torch.rand(1))


def build_model(**config):
    return Net()
"""


@pytest.fixture(autouse=True)
def _own_type() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)  # ranks set their precision's


def _asked(folder: Path, batches: list[int], source: str, **train: Any) -> TrainRequest:
    asked = request(
        folder,
        batches,
        validation_fraction=1600 / 1797,
        epochs=2,
        precision="fp64",
        optimizer={"name": "momentum"},
        **train,
    )
    (Path(asked.source_folder) / "net.py").write_text(source)
    return asked


def _recomputing(asked: TrainRequest, by_rank: list[list[str]]) -> TrainRequest:
    """The request, with these modules recomputed by each rank."""
    asked = with_layout(asked, {})
    layout = asked.plan.layout
    assert layout is not None
    pipelines = [
        one.model_copy(update={"stages": [one.stages[0].model_copy(update={"recompute": names})]})
        for one, names in zip(layout.pipelines, by_rank, strict=True)
    ]
    layout = layout.model_copy(update={"pipelines": pipelines})
    return asked.model_copy(update={"plan": asked.plan.model_copy(update={"layout": layout})})


def _outer_modules(asked: TrainRequest) -> list[str]:
    """The modules that the model calls itself and that can be recomputed."""
    step = structure_of(asked).recorded_step()
    assert step is not None
    return list(dict.fromkeys(one.name for one in step.lifetimes.calls if one.parent == 0))


def _evaluate(rank: Rank, step: int) -> None:
    if step == 2:
        rank.validate()


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_any_family_trains_as_without(tmp_path: Path, family: str) -> None:
    asked = _asked(tmp_path, [62], source_of(family))
    (plain,) = train_in_threads(asked, tmp_path / "plain", state, before=_evaluate)
    units = structure_of(asked).units
    run = run_of(units[0].modules[0], units[-1].modules[-1])
    for names in (_outer_modules(asked), [run]):
        again = _recomputing(asked, [names])
        (found,) = train_in_threads(again, tmp_path / names[0], state, before=_evaluate)
        assert _same(found, plain)


def test_buffers_and_random_numbers_are_those_of_the_first_pass(tmp_path: Path) -> None:
    asked = _asked(tmp_path, [62], _OWN_NORM)
    (plain,) = train_in_threads(asked, tmp_path / "plain", state)
    (found,) = train_in_threads(_recomputing(asked, [["first"]]), tmp_path / "again", state)
    assert _same(found, plain)


def test_ranks_that_recompute_unlike_modules_stay_in_step(tmp_path: Path) -> None:
    # Without dropout: threads share the random numbers that a second pass restores.
    source = source_of("convolutions with norms").replace("Dropout2d(0.2)", "Dropout2d(0.0)")
    asked = _asked(tmp_path, [31, 20, 11], source)
    plain = train_in_threads(with_layout(asked, {}), tmp_path / "plain", state)
    again = _recomputing(asked, [["body", "head"], [], ["body.1", "body.4"]])
    found = train_in_threads(again, tmp_path / "again", state)
    assert all(_same(one, other) for one, other in zip(found, plain, strict=True))


def test_micro_batches_are_recomputed_apart(tmp_path: Path) -> None:
    asked = _asked(tmp_path, [62], source_of("residual network"))
    asked = asked.model_copy(update={"plan": asked.plan.model_copy(update={"accumulation": 3})})
    (plain,) = train_in_threads(asked, tmp_path / "plain", state)
    again = _recomputing(asked, [["blocks.0", "blocks.2", "out"]])
    (found,) = train_in_threads(again, tmp_path / "again", state)
    assert _same(found, plain)


def test_the_forward_pass_is_done_again_only_for_a_backward_pass() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    passes = []
    model[0].register_forward_hook(lambda *_: passes.append(1))
    holder = torch.nn.Module()
    holder.inner = model
    recompute(holder, ["inner"])
    with torch.no_grad():
        holder.inner(torch.ones(2, 4))
    assert len(passes) == 1
    holder.inner(torch.ones(2, 4)).sum().backward()
    assert len(passes) == 3


def test_a_module_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(BadInput, match="recompute: got 'blocks'; allowed: a module of the model"):
        recompute(torch.nn.Linear(2, 2), ["blocks"])


@pytest.mark.parametrize("sync", ["factors", "rows"])
def test_a_layer_that_sends_in_its_passes_is_not_recomputed(tmp_path: Path, sync: str) -> None:
    asked = _recomputing(_asked(tmp_path, [31, 31], source_of("residual MLP")), [["blocks.0"], []])
    layout = asked.plan.layout
    assert layout is not None
    wrong = layout.model_copy(update={"sync": {"blocks.0.1": sync}})
    batches = {one.id: one.batch_size for one in asked.plan.devices}
    with pytest.raises(BadInput, match=r"recompute: got blocks\.0; allowed: a module without"):
        require_permitted(wrong, layers_of(asked), batches)
