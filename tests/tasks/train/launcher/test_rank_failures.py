"""Real ranks fail, diverge or run out of memory: the others continue, or one line says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_case import (
    SLOW,
    assert_every_sample_once,
    request,
    rows,
    with_min_count,
)

from trainwright.tasks.errors import BadInput, TrainingFailed
from trainwright.tasks.train import TrainRequest, train

HOSTILE = """
import os, pathlib, torch

class Net(torch.nn.Module):
    def __init__(self, what, least, mark):
        super().__init__()
        self.what, self.least, self.mark = what, least, pathlib.Path(mark)
        self.out, self.calls = torch.nn.Linear(64, 10), 0

    def forward(self, images):
        scores = self.out(images.flatten(1))
        if self.training:
            self.calls += 1
            if self.what == "memory" and len(images) > self.least:
                raise MemoryError
            if self.calls > 7 and (self.what.endswith("always") or self.is_first()):
                if self.what.startswith("nan"):
                    return scores * float("nan")
                if self.what.startswith("error"):
                    raise RuntimeError("a cable came loose")
        return scores

    def is_first(self):
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

def build_model(what, least=0, mark="mark"):
    return Net(what, least, mark)
"""
GLUTTON = """
import os, torch

class Net(torch.nn.Module):
    def __init__(self, least):
        super().__init__()
        self.least, self.out = least, torch.nn.Linear(64, 10)

    def forward(self, images):
        if self.training and len(images) > self.least and os.environ["HOROVOD_RANK"] == "0":
            open("GROUP", "w").write(str(os.getpid()))
            self.held = torch.ones(1 << 28)
        return self.out(images.flatten(1))

def build_model(what, least=0, mark="mark"):
    return Net(least)
"""


def hostile(
    folder: Path, batches: list[int], what: str, least: int = 0, **train_spec: Any
) -> TrainRequest:
    asked = request(
        folder,
        batches,
        model={"what": what, "least": least, "mark": str(folder / "mark")},
        **train_spec,
    )
    (folder / "source" / "net.py").write_text(HOSTILE)
    return asked


def test_repeatedly_failing_sums_without_a_lost_rank_end_the_training(
    tmp_path: Path,
) -> None:
    asked = request(
        tmp_path,
        [20, 20],
        devices=SLOW,
        epochs=1,
        backend="torch",
        faults={"wait_for_devices": "3s"},
    )
    cut = "from trainwright.tasks.train.exchange.collective import PeersLost\n"
    cut += "def loss(*_):\n    raise PeersLost('no route')\n"
    source = tmp_path / "source" / "net.py"
    source.write_text(source.read_text() + cut)
    with pytest.raises(
        TrainingFailed,
        match=r"failed \d times in a row, and no rank was lost: no route; .*have details$",
    ):
        train(asked)


@pytest.mark.parametrize("backend", ["horovod", "torch"])
def test_a_sum_of_an_unsupported_type_fails_at_once_and_loses_no_rank(
    tmp_path: Path, heard: list[dict[str, Any]], backend: str
) -> None:
    asked = request(tmp_path, [20, 20], model={"norm": True}, epochs=1, backend=backend)
    source = tmp_path / "source" / "net.py"
    own = (
        "        self.norm.forward.sum(torch.ones(1, dtype=torch.bfloat16), 'own')\n        return"
    )
    source.write_text(source.read_text().replace("        return", own, 1))
    with pytest.raises(
        TrainingFailed,
        match=r"rank \d .*own: ranks can't sum bfloat16, only float16, float32, float64, int32, in",
    ):
        train(asked)
    assert not any(event["event"] == "world" for event in heard)


def test_a_single_error_costs_a_process_but_not_the_training(tmp_path: Path) -> None:
    asked = hostile(tmp_path, [40, 20], "error once", epochs=2, backend="torch")
    result = train(asked)
    assert (
        "failed (RuntimeError: a cable came loose); continues with 1 of 2"
        in result.split_events[0].reason
    )
    assert_every_sample_once(asked, 2, 2)


def test_an_error_repeated_at_the_same_step_ends_the_training_with_its_cause(
    tmp_path: Path,
) -> None:
    with pytest.raises(TrainingFailed, match=r"rank \d .*a cable came loose.*its log is"):
        train(hostile(tmp_path, [40, 20], "error always", backend="torch"))


def test_a_loss_that_is_not_a_number_returns_to_the_checkpoint_with_half_the_rate(
    tmp_path: Path,
) -> None:
    asked = hostile(tmp_path, [40, 20], "nan once", epochs=1, backend="torch")
    result = train(asked)
    assert len(result.split_events) == 1
    assert result.split_events[0].step == 5
    assert (
        "the loss is nan at step 7 (learning rate 0.01); back to step 5 with 50 % of"
        in result.split_events[0].reason
    )
    assert_every_sample_once(asked, 2, 1)
    assert [row["learning_rate"] for row in rows(asked, "steps-rank0")] == [0.01] * 5 + [0.005] * 19


def test_a_loss_that_is_repeatedly_not_a_number_fails_with_step_and_rate(tmp_path: Path) -> None:
    asked = hostile(tmp_path, [40, 20], "nan always", backend="torch")
    with pytest.raises(
        TrainingFailed,
        match=r"nan at step 5 \(learning rate 0.00125\); training still diverges after 3 restarts",
    ):
        train(asked)


def test_a_rank_out_of_memory_gets_a_smaller_batch_and_the_others_take_more(
    tmp_path: Path,
) -> None:
    asked = hostile(tmp_path, [50, 10], "memory", least=37, epochs=1, backend="torch")
    result = train(asked)
    assert result.split_events[0].reason == (
        "rank 0 (here/0) ran out of memory with a batch of 50; its batch is now limited to 25; "
        "continues with 2 of 2"
    )
    assert result.split_events[0].batch_sizes == [25, 35]
    assert [device.batch_size for device in result.devices] == [25, 35]
    assert_every_sample_once(asked, 2, 1)


def test_a_model_that_does_not_fit_its_labels_is_bad_input_and_not_retried(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    with pytest.raises(BadInput, match="model: "):
        train(request(tmp_path, [40, 20], model={"broken": True}))
    assert not any(event["event"] == "world" for event in heard)


def test_complex_parameters_are_bad_input_naming_one(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 20], backend="torch")
    source = tmp_path / "source" / "net.py"
    source.write_text(
        source.read_text().replace(
            "torch.nn.Linear(2, 2)", "torch.nn.Linear(2, 2, dtype=torch.complex64)"
        )
    )
    with pytest.raises(
        BadInput, match=r"the parameter unused.weight is complex64, .*view_as_complex"
    ):
        train(asked)


@pytest.mark.slow
def test_a_rank_killed_for_lack_of_memory_comes_back_with_a_batch_that_fits(
    tmp_path: Path, heard: list[dict[str, Any]], small_memory: Path
) -> None:
    asked = hostile(tmp_path, [40, 20], "gluttony", least=30, epochs=1, backend="torch")
    asked = with_min_count(asked, 2)
    (tmp_path / "source" / "net.py").write_text(
        GLUTTON.replace("GROUP", str(small_memory / "cgroup.procs"))
    )
    result = train(asked)
    assert "most likely by the kernel for lack of memory" in result.split_events[0].reason
    assert (
        "ran out of memory with a batch of 40; its batch is now limited to 20"
        in result.split_events[0].reason
    )
    assert result.split_events[0].batch_sizes == [20, 40]
    assert_every_sample_once(asked, 2, 1)
