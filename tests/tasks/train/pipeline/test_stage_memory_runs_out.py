"""A stage that does not fit into its device's memory ends the training, and says what would."""

from __future__ import annotations

from pathlib import Path

import pytest
from staged_case import with_stages
from training_case import NO_SPARE, request

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train import train

_MODEL = """
import os, torch

class Out(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.calls = torch.nn.Linear(32, 10), 0

    def forward(self, rows):
        return self.product(rows)

def build_model(norm=False, dropout=0.0, broken=False):
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), Out()
    )
    if os.environ.get("HOROVOD_RANK") == "1":
        def lacks(module, given, _):
            module.calls += module.training
            if module.calls > 12:
                raise MemoryError
        net[3].product.register_forward_hook(lacks)
        net[3].product.calls = 0
    return net
"""


def test_a_stage_out_of_memory_is_named_with_what_would_fit(tmp_path: Path) -> None:
    asked = request(tmp_path, [24, 0], validation_fraction=1100 / 1797, backend="torch", **NO_SPARE)
    (Path(asked.source_folder) / "net.py").write_text(_MODEL)
    staged = with_stages(asked, [([12, 12], [0.5])])
    with pytest.raises(TrainingFailed) as failed:
        train(staged)
    said = str(failed.value)
    device = staged.plan.devices[1].id
    assert f"rank 1 ({device}): stage 2 of 2 on {device}, " in said
    assert "does not fit into memory with micro-batches of 12" in said
    assert "train.layout.micro_batches: 4, of 6 samples" in said
    assert "train.layout.recompute: all" in said
    assert failed.value.exit_code == 1
    assert "\n" not in said


_GLUTTON = """
import os, torch

class Out(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.product = torch.nn.Linear(32, 10)

    def forward(self, rows):
        return self.product(rows)

def build_model():
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), Out()
    )
    net[3].product.calls = 0
    if os.environ.get("HOROVOD_RANK") == "1":
        def takes_too_much(module, given, _):
            module.calls += module.training
            if module.calls > 12:
                open("GROUP", "w").write(str(os.getpid()))
                module.held = torch.ones(1 << 28)
        net[3].product.register_forward_hook(takes_too_much)
    return net
"""


@pytest.mark.slow
def test_a_stage_that_the_kernel_kills_for_lack_of_memory_is_named_too(
    tmp_path: Path, small_memory: Path
) -> None:
    asked = request(tmp_path, [24, 0], validation_fraction=1100 / 1797, backend="torch", **NO_SPARE)
    source = _GLUTTON.replace("GROUP", str(small_memory / "cgroup.procs"))
    (Path(asked.source_folder) / "net.py").write_text(source)
    staged = with_stages(asked, [([12, 12], [0.5])])
    with pytest.raises(TrainingFailed) as failed:
        train(staged)
    said, device = str(failed.value), staged.plan.devices[1].id
    assert said.startswith(
        f"rank 1 ({device}) was killed by SIGKILL, most likely by the kernel for lack of memory: "
        f"stage 2 of 2 on {device}, "
    )
    assert "does not fit into memory with micro-batches of 12; less take: " in said
    assert "train.layout.micro_batches: 4, of 6 samples" in said
    assert "train.layout.recompute: all" in said
    assert "\n" not in said
