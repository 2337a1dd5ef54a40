"""The search for bit widths keeps the teacher's decisions, and saves cells."""

from __future__ import annotations

import circuit_nets
import numpy as np
import torch
from torch import nn

from trainwright.tasks.export.circuits.fine_tune import TuneLimits, tune
from trainwright.tasks.export.circuits.predict_cells import adder_bits


def test_narrow_models_come_first_and_decide_like_the_trained_one() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    rows = circuit_nets.rows((8,), 300, signed=True)
    circuit = circuit_nets.circuit_of(net, rows)
    limits = TuneLimits(tolerance=0.05, search_s=5, trial_epochs=1, final_epochs=5)
    found = tune(circuit, rows, True, False, lambda one: sum(adder_bits(one)), limits)
    assert found[0].cells < found[-1].cells
    assert set(found[-1].widths.weights) == {8}
    decisions = net(torch.from_numpy(rows)).argmax(1).numpy()
    for one in found:
        outputs = one.model.outputs(one.model.run(one.model.prepare({"inputs": rows})))
        assert np.mean(outputs.argmax(1) == decisions) > 0.9
