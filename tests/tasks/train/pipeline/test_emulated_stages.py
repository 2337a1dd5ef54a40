"""Stages on emulated devices take the time of all their layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import HEAD, TAIL
from layout_ranks import structure_of, train_in_threads
from staged_case import with_stages
from training_case import request

from trainwright.estimator.devices import EMULATED_SAMPLE_S
from trainwright.estimator.predict.step_time import predict_curve
from trainwright.tasks.train.rank.rank import Rank

MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.third = nn.Linear(64, 10)

    def forward(self, images):
        seen = torch.tanh(torch.sin(self.first(images.flatten(1))))
        return self.third(torch.tanh(torch.sin(self.second(seen))))
"""
"""Its functional operations belong to `Net`, which runs on no rank as a module."""


def due_s(rank: Rank) -> float:
    """The emulated time of the last step."""
    assert rank.emulated is not None
    return rank.emulated.due_s


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_stages_take_the_time_of_the_whole_model_together(tmp_path: Path, schedule: str) -> None:
    devices = [{"type": "emulated", "speed": 8.0}] * 2
    asked = request(tmp_path, [32, 0], validation_fraction=1733 / 1797, epochs=1, devices=devices)
    (Path(asked.source_folder) / "net.py").write_text(HEAD + MODEL + TAIL)
    staged = with_stages(asked, [([16, 16], [0.5])], schedule)
    curve = predict_curve(structure_of(asked, 32), None, device_type="emulated", speed=8.0)
    plan = staged.plan.model_copy(update={"emulated_layers": list(curve.layers)})
    staged = staged.model_copy(update={"plan": plan})
    found = train_in_threads(staged, tmp_path / "store", due_s)
    assert all(one > 0 for one in found)
    assert sum(found) == pytest.approx(32 * EMULATED_SAMPLE_S / 8.0, rel=1e-6)
