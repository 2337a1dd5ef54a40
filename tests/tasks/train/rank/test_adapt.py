"""A model's source sets its initial state from training rows, once and alike on all ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_case import NO_SPARE, SLOW, request, when_checkpoint

from trainwright.tasks.data import dataset
from trainwright.tasks.errors import BadInput, Interrupted
from trainwright.tasks.train import TrainRequest, ramp, train
from trainwright.tasks.train.exchange.collective import TorchCollective
from trainwright.tasks.train.rank import replica

MODEL = """
import json, pathlib, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("names", torch.zeros(3, dtype=torch.uint8))
        self.out = torch.nn.Linear(64, 10)

    def forward(self, images):
        return self.out(images.flatten(1) - self.mean)

def build_model():
    return Net()

def adapt(model, inputs, targets, names):
    assert not torch.is_grad_enabled() and len(inputs) == len(targets)
    model.mean.copy_(inputs.flatten(1).mean(0))
    model.names.copy_(torch.tensor(list("".join(names["label"])[:3].encode())))
    model.out.weight.copy_(torch.randn(10, 64))
    with open(pathlib.Path(__file__).parent / "calls", "a") as calls:
        calls.write(json.dumps([len(inputs), float(inputs.sum()), model.training]) + "\\n")
"""


def adapting(folder: Path, **train: Any) -> TrainRequest:
    """A training of a model that records its calls of `adapt` beside its source."""
    asked = request(folder, [40, 20], devices=SLOW, epochs=2, **train, **NO_SPARE)
    (folder / "source" / "net.py").write_text(MODEL)
    return asked


def calls(folder: Path) -> list[str]:
    """The recorded calls."""
    return (folder / "source" / "calls").read_text().splitlines()


def test_both_ranks_adapt_once_with_the_training_rows_and_a_resumed_training_does_not(
    tmp_path: Path,
) -> None:
    asked, stop = adapting(tmp_path), threading.Event()
    watcher = when_checkpoint(tmp_path, 5, stop.set)
    with pytest.raises(Interrupted):
        train(asked, stop=stop)
    watcher.join()
    assert train(asked).resumed_from_step
    assert len(calls(tmp_path)) == 2
    assert len(set(calls(tmp_path))) == 1
    assert calls(tmp_path)[0].startswith("[1438, ")
    loaded = dataset.load(asked.job.data, asked.job.train.seed)
    images = loaded.batch(loaded.split.train)[0]["inputs"]
    for step in tmp_path.glob("run/checkpoints/*/model.safetensors"):
        model = load_file(step)
        mean = torch.from_numpy(images).flatten(1).mean(0)
        assert torch.allclose(model["mean"], mean, atol=1e-6)
        assert bytes(model["names"].tolist()) == b"012"


def test_a_search_for_the_learning_rate_starts_from_the_adapted_model(tmp_path: Path) -> None:
    ramp(adapting(tmp_path), [1e-4, 1e-3, 1e-2])
    assert len(calls(tmp_path)) == 2


def test_an_error_in_adapt_is_one_line_and_not_retried(tmp_path: Path) -> None:
    asked = adapting(tmp_path)
    source = tmp_path / "source" / "net.py"
    source.write_text(MODEL.replace("model.mean.copy_(", "model.mean.nonsense("))
    with pytest.raises(
        BadInput, match=r"model: adapt raised AttributeError: .*no attribute 'nonsense'"
    ) as error:
        train(asked)
    assert "\n" not in str(error.value)


def test_of_many_rows_every_rank_takes_the_same_evenly_spaced_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "ADAPT_ROWS", 100)
    asked = adapting(tmp_path)
    collective = TorchCollective(0, 1, str(tmp_path / "meeting"))
    rank = replica.Replica(asked, dataset.load(asked.job.data), collective, torch.device("cpu"), 0)
    rank.adapt()
    collective.shutdown()
    assert calls(tmp_path)[0].startswith("[96, ")
