"""In half precision, unequal ranks equal one process up to the rounding of that precision."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_ranks import train_in_threads
from safetensors.torch import load_file
from test_joint_batch import state
from training_case import LEARNING_RATE, NO_SPARE, alone, request, rows, when_checkpoint

from trainwright.estimator.devices import DEVICE_TYPES, half_precision
from trainwright.tasks.data import dataset as data
from trainwright.tasks.errors import Interrupted
from trainwright.tasks.train import train
from trainwright.tasks.train.batch.sampling import epoch_order
from trainwright.tasks.train.rank.loss_scale import GROWS_AFTER_STEPS, LEAST, MOST, LossScale
from trainwright.tasks.train.rank.rank import Rank

ROWS_OF_20_STEPS = 0.332
SPLIT = [45, 15]


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The greatest difference of a tensor, relative to its own norm."""
    norm = torch.linalg.vector_norm
    assert {name: one.dtype for name, one in found.items()} == {
        name: one.dtype for name, one in expected.items()
    }
    return max(
        float(norm(one.double() - expected[name].double()))
        / max(1e-12, float(norm(expected[name].double())))
        for name, one in found.items()
    )


def trained(folder: Path, step: int = 20) -> dict[str, torch.Tensor]:
    """The model of a checkpoint."""
    return load_file(folder / f"run/checkpoints/step-{step:08d}/model.safetensors")


@pytest.mark.parametrize(
    ("precision", "backend", "optimizer", "clip_norm"),
    [
        ("amp", "torch", "momentum", 0.5),
        # Without clipping: the norm of bf16 gradients is computed in bf16, which is too inexact.
        ("bf16", "horovod", "adam", None),
    ],
)
def test_two_ranks_at_3_to_1_differ_from_one_process_only_by_rounding(
    tmp_path: Path, precision: str, backend: str, optimizer: str, clip_norm: float | None
) -> None:
    asked = request(
        tmp_path,
        SPLIT,
        validation_fraction=ROWS_OF_20_STEPS,
        precision=precision,
        backend=backend,
        optimizer={"name": optimizer},
        clip_norm=clip_norm,
        **NO_SPARE,
    )
    assert train(asked).steps == 20
    found, whole = trained(tmp_path), alone(asked)
    # Each part's gradient is rounded to half precision. One process that computes the same parts
    # one after another rounds the same way. With other parts, it differs from the whole batch by as
    # much as the ranks do.
    assert difference(found, alone(asked, SPLIT)) <= 1e-6
    rounding = max(
        difference(alone(asked, parts), whole)
        for parts in ([30, 30], [50, 10], [20, 20, 20], [15, 45])
    )
    assert 0 < difference(found, whole) <= 3 * rounding


@pytest.mark.parametrize("precision", ["amp", "bf16"])
def test_batch_norm_sees_the_joint_batch_in_half_precision(tmp_path: Path, precision: str) -> None:
    asked = request(
        tmp_path,
        [30, 15, 5],
        validation_fraction=646 / 1797,
        model={"norm": True},
        precision=precision,
    )
    single = asked.job.train.model_copy(update={"precision": "fp32"})
    in_fp32 = alone(
        asked.model_copy(update={"job": asked.job.model_copy(update={"train": single})})
    )
    found, one = train_in_threads(asked, tmp_path / "store", state)[0], alone(asked)
    statistics = [name for name in one if "running" in name]
    assert {found[name].dtype for name in statistics} == {torch.float32}
    rounding = difference(
        {name: value.double() for name, value in one.items()},
        {name: in_fp32[name].double() for name in one},
    )
    assert difference(found, one) < rounding
    # Statistics over each rank's own samples would be off by several percent.
    assert (
        difference(
            {name: found[name] for name in statistics}, {name: one[name] for name in statistics}
        )
        < 0.01
    )


def test_micro_batches_in_bf16_add_up_in_fp32(tmp_path: Path) -> None:
    # The micro-batches divide evenly, so one process can compute them one after another.
    asked = request(
        tmp_path,
        [40, 20],
        validation_fraction=ROWS_OF_20_STEPS,
        precision="bf16",
    )
    asked = asked.model_copy(update={"plan": asked.plan.model_copy(update={"accumulation": 4})})
    found = train_in_threads(asked, tmp_path / "store", state)[0]
    # After rounding to bf16, the order of an fp32 sum rarely shows; bf16 sums would differ a lot.
    whole = difference(alone(asked, [60]), alone(asked, [10] * 4 + [5] * 4))
    assert difference(found, alone(asked, [10] * 4 + [5] * 4)) < whole / 4


def test_a_stopped_training_in_half_precision_resumes_to_the_last_digit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "devices": [{"type": "emulated", "speed": speed} for speed in (1.0, 0.5)],
        "optimizer": {"name": "adamw"},
        "model": {"norm": True, "dropout": 0.3},
        "precision": "amp",
        "schedule": "cosine",
        "backend": "torch",
        **NO_SPARE,
    }
    whole, stopped = (
        request(tmp_path / name, [40, 20], **settings) for name in ("whole", "stopped")
    )
    expected, stop = train(whole), threading.Event()
    watcher = when_checkpoint(tmp_path / "stopped", 10, stop.set)
    with pytest.raises(Interrupted, match="checkpoint"):
        train(stopped, stop=stop)
    watcher.join()
    result = train(stopped)
    assert result.resumed_from_step
    assert result.metrics == expected.metrics
    last = result.checkpoints[-1].step
    assert difference(trained(tmp_path / "stopped", last), trained(tmp_path / "whole", last)) == 0
    losses = [[row["loss"] for row in rows(asked, "steps-rank1")] for asked in (stopped, whole)]
    assert losses[0] == losses[1]


class Together:
    """A collective of two ranks that are threads of this process."""

    def __init__(self, rank: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self.wait_s = rank, 2, 0.0
        self._shared = shared
        self._rounds: dict[str, int] = {}

    def sum_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self.finish(self.start_sum(tensor, name))
        return tensor

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        self._rounds[name] = number = self._rounds.get(name, 0) + 1
        self._shared[name, number, self.rank] = tensor.clone()
        return tensor, name, number

    def finish(self, handle: Any) -> None:
        tensor, name, number = handle
        self._shared["barrier"].wait(60)
        tensor.copy_(self._shared[name, number, 0] + self._shared[name, number, 1])
        self._shared["barrier"].wait(60)

    def shutdown(self) -> None:
        return None


@pytest.mark.parametrize("norm", [False, True])
def test_if_one_rank_overflows_in_fp16_all_skip_the_step(tmp_path: Path, norm: bool) -> None:
    # The first device type has no bf16 units and computes in fp16; the other uses bf16, which has
    # the range of fp32.
    devices = [{"type": "nvidia-t4"}, {"type": "cpu"}]
    asked = request(tmp_path, SPLIT, precision="amp", devices=devices, model={"norm": norm})
    dataset, shared = data.load(asked.job.data), {"barrier": threading.Barrier(2)}
    ranks = [
        Rank(asked, dataset, Together(number, shared), torch.device("cpu"), number)
        for number in (0, 1)
    ]
    order = epoch_order(ranks[0].train_rows, 0, 0)
    start = {name: value.clone() for name, value in ranks[0].model.state_dict().items()}
    for rank in ranks:
        rank.loss_scale = LossScale(value=MOST)
    overflowed: list[list[bool]] = [[], []]
    found: list[list[tuple[float, float]]] = [[], []]
    after_first: list[dict[str, torch.Tensor]] = [{}, {}]

    def run(number: int) -> None:
        rank = ranks[number]
        for step in range(20):
            seen = rank.step(order, step * 60, step)
            overflowed[number].append(rank._gradients.overflowed)
            rank.update(LEARNING_RATE)
            found[number].append((seen.loss, rank.loss_scale.value))
            if step == 0:
                after_first[number] = {
                    name: value.detach().clone() for name, value in rank.model.named_parameters()
                }

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert overflowed[0][0]
    assert norm or not any(overflowed[1])  # batch normalisation spreads the overflow
    assert all(
        torch.equal(start[name], value) for one in after_first for name, value in one.items()
    )
    assert found[0] == found[1]
    scales = [scale for _, scale in found[0]]
    assert scales[0] == MOST / 2
    # The scale has become stable.
    assert scales[-1] == scales[-5] == MOST / 2 ** sum(overflowed[0])
    for name, value in ranks[0].model.named_parameters():
        assert torch.equal(value, ranks[1].model.get_parameter(name))
    assert found[0][-1][0] < found[0][0][0]
    document = ranks[0].noise_document()
    ranks[1].begin_anew()
    ranks[1].load_noise(document)
    assert ranks[1].loss_scale == ranks[0].loss_scale


def test_the_loss_scale_halves_at_overflows_and_doubles_later_within_its_bounds() -> None:
    scale = LossScale()
    first = scale.value
    scale.after_step(overflowed=True)
    assert scale.value == first / 2
    for _ in range(GROWS_AFTER_STEPS):
        assert scale.value == first / 2
        scale.after_step(overflowed=False)
    assert scale.value == first
    for overflowed, bound in ((True, LEAST), (False, MOST)):
        for _ in range(40 * GROWS_AFTER_STEPS):
            scale.after_step(overflowed=overflowed)
        assert scale.value == bound


def test_devices_without_bf16_units_compute_in_fp16() -> None:
    old = {name for name in DEVICE_TYPES if half_precision(name) == "fp16"}
    assert old == {
        "nvidia-m40-12gb",
        "nvidia-p100-16gb",
        "nvidia-v100-16gb",
        "nvidia-v100-32gb",
        "nvidia-t4",
    }
