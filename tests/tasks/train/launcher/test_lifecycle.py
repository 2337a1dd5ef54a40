"""Trainings that are stopped, killed, damaged or replayed, or lose the lease on their devices."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from training_case import NO_SPARE, ranks, request, rows, scalars, when_checkpoint

from trainwright.estimator.structure import DenseProduct, LayerFacts, Unit
from trainwright.tasks.data import dataset
from trainwright.tasks.errors import BadInput, Interrupted, RunHeld, TrainingFailed
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage
from trainwright.tasks.runs.artefacts.training_result import SplitEvent
from trainwright.tasks.train import ramp, train

SLOW = [{"type": "emulated", "speed": 1.0}, {"type": "emulated", "speed": 0.5}]
"""devices on which a step of 40 and 20 samples takes 40 ms: long enough to interrupt"""


def losses(asked: Any, rank: int) -> list[tuple[int, float, int]]:
    """Step, loss and batch size of every recorded step."""
    return [
        (row["step"], row["loss"], row["batch_size"]) for row in rows(asked, f"steps-rank{rank}")
    ]


def weights(folder: Path, step: int) -> bytes:
    """The model of a checkpoint."""
    return (folder / f"run/checkpoints/step-{step:08d}/model.safetensors").read_bytes()


def test_a_stopped_training_resumes_from_its_checkpoint_with_identical_losses(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    # 1,438 rows in steps of 60: 24 an epoch. The stop falls into the second epoch.
    settings: dict[str, Any] = {
        "devices": SLOW,
        "model": {"norm": True, "dropout": 0.3},
        "epochs": 2,
        "optimizer": {"name": "adamw"},
        "schedule": "cosine",
        "checkpoint": {"every_steps": 5, "keep_last": 3},
        **NO_SPARE,
    }
    whole = request(tmp_path / "whole", [40, 20], **settings)
    events = [SplitEvent(step=31, batch_sizes=[30, 30], reason="as recorded")]
    whole = whole.model_copy(update={"replay_events": events})
    expected = train(whole)
    assert expected.split_events == events

    stopped = request(tmp_path / "stopped", [40, 20], **settings).model_copy(
        update={"replay_events": events}
    )
    stop = threading.Event()
    watcher = when_checkpoint(tmp_path / "stopped", 30, stop.set)
    with pytest.raises(Interrupted, match="checkpoint"):
        train(stopped, stop=stop)
    watcher.join()
    assert ranks() == {}
    kept = sorted(tmp_path.glob("stopped/run/checkpoints/*/state.json"))
    newest = kept[-1].parent / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])  # so the training must use the previous one

    result = train(stopped)
    assert result.resumed_from_step == int(kept[-2].parent.name.removeprefix("step-"))
    messages = [event["message"] for event in heard if event["event"] == "notice"]
    assert any(
        f"{newest.parent.name}/model.safetensors: has " in one and "before it is used" in one
        for one in messages
    )
    assert result.metrics == expected.metrics
    assert result.split_events == events
    assert [losses(stopped, rank) for rank in (0, 1)] == [losses(whole, rank) for rank in (0, 1)]
    assert [step for step, _, _ in losses(stopped, 0)] == list(range(48))
    found, wanted = rows(stopped, "epochs"), rows(whole, "epochs")
    assert [(row["epoch"], row["train_loss"], row["loss"], row["accuracy"]) for row in found] == [
        (row["epoch"], row["train_loss"], row["loss"], row["accuracy"]) for row in wanted
    ]
    assert weights(tmp_path / "stopped", 48) == weights(tmp_path / "whole", 48)
    assert [device.samples for device in result.devices] == [
        device.samples for device in expected.devices
    ]
    assert [one.step for one in result.checkpoints][-1] == 48
    assert sum(one.best for one in result.checkpoints) == 1
    assert_tensorboard_shows_the_metrics(stopped)


def assert_tensorboard_shows_the_metrics(asked: Any) -> None:
    """Every step and epoch occurs once, also across a resume; ranks have the written steps."""
    shown = scalars(asked)
    by_rank = [
        {row["step"] + 1: row for row in rows(asked, f"steps-rank{rank}")} for rank in (0, 1)
    ]
    for tag, name in (("loss/train", "loss"), ("learning_rate", "learning_rate")):
        assert shown[tag] == [(step, pytest.approx(row[name])) for step, row in by_rank[0].items()]
    for name in ("loss", "accuracy"):
        expected = [(row["step"] + 1, pytest.approx(row[name])) for row in rows(asked, "epochs")]
        assert shown[f"{name}/validation"] == expected
    for rank, (own, device) in enumerate(zip(by_rank, SLOW, strict=True)):
        for name in ("batch_size", "memory_bytes"):
            found = shown[f"rank-{rank}/{name}"]
            assert found == [(step, pytest.approx(own[step][name])) for step, _ in found]
        times = shown[f"rank-{rank}/compute_s"]
        assert times[0][0] == 1  # the first step is always written
        # Emulated: no sample takes less than a millisecond at full speed.
        assert all(
            taken_s >= 0.999e-3 * own[step]["batch_size"] / device["speed"]
            for step, taken_s in times
        )


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 20], devices=SLOW, epochs=500)
    (tmp_path / "request.json").write_text(asked.model_dump_json(by_alias=True))
    program = (
        "import sys; from pathlib import Path;"
        "from trainwright.tasks.train import TrainRequest, train;"
        "train(TrainRequest.model_validate_json(Path(sys.argv[1]).read_text()))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "request.json")])
    seen: dict[int, psutil.Process] = {}

    def kill() -> None:
        seen.update(ranks())
        launcher.send_signal(signal.SIGKILL)

    when_checkpoint(tmp_path, 5, kill).join()
    launcher.wait()
    assert {0, 1} <= set(seen)
    _, alive = psutil.wait_procs(list(seen.values()), timeout=60)
    assert alive == []


def test_a_lost_lease_ends_the_training_without_another_checkpoint(tmp_path: Path) -> None:
    settings = {"every_steps": 20, "keep_best": False}
    asked = request(tmp_path, [40, 20], devices=SLOW, epochs=50, checkpoint=settings, **NO_SPARE)
    first = tmp_path / "run/checkpoints/step-00000020/state.json"
    with pytest.raises(RunHeld):
        train(asked, still_mine=lambda: not first.exists())
    assert ranks() == {}
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000020"]


def test_a_training_that_lost_its_lease_before_its_start_changes_nothing(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 20])
    train(asked)
    folder = tmp_path / "run"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunHeld, match="nothing was changed"):
        train(asked.model_copy(update={"resume": False}), still_mine=lambda: False)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_last_batch_of_one_row_does_not_break_batch_normalisation(
    tmp_path: Path,
) -> None:
    asked = request(tmp_path, [300, 179], epochs=2, model={"norm": "features"})
    assert train(asked).state == "success"
    last = [
        sum(row["batch_size"] for row in rows(asked, f"steps-rank{rank}") if row["step"] == 3)
        for rank in (0, 1)
    ]
    assert sum(last) == 1


def test_ctrl_c_stops_only_the_launcher_and_saves_a_checkpoint(tmp_path: Path) -> None:
    asked = request(
        tmp_path, [40, 20], devices=SLOW, epochs=50, checkpoint={"every_steps": 15}, **NO_SPARE
    )
    watcher = when_checkpoint(tmp_path, 15, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted) as caught:
        train(asked)
    watcher.join()
    assert ranks() == {}
    assert (
        tmp_path / f"run/checkpoints/step-{caught.value.details['step']:08d}/state.json"
    ).exists()


def test_the_ramp_ends_when_the_loss_diverges_and_keeps_nothing(tmp_path: Path) -> None:
    asked = request(tmp_path, [60], optimizer={"name": "sgd"})
    rates = [10 ** (-3 + step / 4) for step in range(40)]
    points = ramp(asked, rates)
    assert 10 < len(points) < 40
    assert [point.learning_rate for point in points] == rates[: len(points)]
    assert all(point.accuracy is not None and 0 <= point.accuracy <= 1 for point in points)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_fails_with_its_step(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 20], optimizer={"name": "sgd"}).model_copy(
        update={"learning_rate": 1e30}
    )
    with pytest.raises(TrainingFailed, match=r"rank \d .*the loss is (nan|inf) at step [1-9]"):
        train(asked)
    assert ranks() == {}


def test_a_missing_device_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"here/0: .*no such GPU"):
        train(request(tmp_path, [60], devices=[{"type": "nvidia-t4"}]))


@pytest.mark.parametrize("act", [train, lambda asked: ramp(asked, [0.1])])
def test_data_changed_after_validation_is_bad_input_before_a_rank_starts(
    tmp_path: Path, heard: list[dict[str, Any]], act: Callable[[Any], object]
) -> None:
    table = tmp_path / "data.csv"
    table.write_text("x,label\n" + "".join(f"{place},{'ab'[place % 2]}\n" for place in range(40)))
    asked = request(tmp_path, [20])
    spec = asked.job.data.model_copy(update={"uri": str(table)})
    changed = {
        "job": asked.job.model_copy(update={"data": spec}),
        "schema_": dataset.describe(spec),
    }
    table.write_text(table.read_text() + "7,a\n")
    with pytest.raises(
        BadInput, match=r"data\.csv has changed since it was validated; --new starts a new run"
    ):
        act(asked.model_copy(update=changed))
    assert heard == []
    assert not (tmp_path / "run").exists()


def test_a_plan_with_another_strategy_is_bad_input(tmp_path: Path) -> None:
    asked = request(tmp_path, [60])
    other = asked.plan.model_copy(update={"strategy": {"name": "pipeline"}})
    with pytest.raises(
        BadInput, match=r"strategy: got 'pipeline', without a layout; trainwright can only train"
    ):
        train(asked.model_copy(update={"plan": other}))


def test_factors_of_a_layer_that_one_pipeline_holds_are_refused_before_a_rank_starts(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    asked = request(tmp_path, [60, 60])
    first, second = asked.plan.devices
    dense = DenseProduct(kind="linear", rows_per_sample=1, inputs=4, outputs=4)
    layers = [
        LayerFacts(name=one, kind="Linear", parameters={f"{one}.weight": 16}, dense=dense)
        for one in "ab"
    ]
    stages = [
        Stage(device=first.id, layers=["a"]),
        Stage(device=second.id, layers=["b"]),
    ]
    layout = Layout(
        name="pipeline",
        pipelines=[Pipeline(micro_batches=[30, 30], stages=stages)],
        sync={"a": "factors"},
    )
    planned = {
        "layout": layout,
        "layers": layers,
        "units": [Unit(name=one.name, modules=[one.name], layers=[one.name]) for one in layers],
    }
    with pytest.raises(BadInput, match="layout: a can't be factors: only one pipeline holds it"):
        train(asked.model_copy(update={"plan": asked.plan.model_copy(update=planned)}))
    assert heard == []


@pytest.mark.slow
def test_the_split_adapts_to_the_devices_speeds_and_can_be_replayed(
    tmp_path: Path,
) -> None:
    devices = [{"type": "emulated", "speed": 2.0}, {"type": "emulated", "speed": 1.0}]
    settings: dict[str, Any] = {"devices": devices, "adaptive_split": True, "epochs": 12}
    first = request(tmp_path / "first", [60, 60], **settings)
    result = train(first)
    fast, slow = (device.batch_size for device in result.devices)
    assert fast + slow == 120
    assert fast > slow
    assert result.split_events

    again = request(tmp_path / "again", [60, 60], **settings)
    again = again.model_copy(update={"replay_events": result.split_events})
    train(again)
    assert losses(again, 1) == losses(first, 1)


def test_ranks_with_fractions_of_a_core_are_limited_to_them_and_leave_no_cgroup(
    tmp_path: Path,
) -> None:
    asked = request(
        tmp_path,
        [40, 20],
        devices=[{"type": "cpu", "cores": 1.0}, {"type": "cpu", "cores": 0.5}],
        epochs=3,
        **NO_SPARE,
    )
    own, seen, ended = f"trainwright-{os.getpid()}-1", threading.Event(), threading.Event()

    def look() -> None:
        while not (seen.is_set() or ended.wait(0.02)):
            with contextlib.suppress(
                KeyError, OSError
            ):  # the rank, or one of its threads, is starting or ending
                for line in Path(f"/proc/{ranks()[1].pid}/task").glob("*/cgroup"):
                    if own in line.read_text():
                        seen.set()

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        result = train(asked)
    finally:
        ended.set()
        watcher.join()
    assert result.devices[1].share in ("cgroup", "duty cycle")
    assert seen.is_set() == (result.devices[1].share == "cgroup")
    left = [*Path("/sys/fs/cgroup").glob(f"trainwright-{os.getpid()}-*")]
    left += Path("/sys/fs/cgroup").glob(f"cpu/trainwright-{os.getpid()}-*")
    assert left == []
    assert result.measured.energy_j is not None
    assert result.measured.energy_j > 0


def test_a_duty_cycle_stops_and_continues_a_process_and_finally_lets_it_run() -> None:
    from trainwright.infra.cpu_share import DutyCycle

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            cycle, watched, seen = DutyCycle(process.pid, 0.5), psutil.Process(process.pid), set()
            for _ in range(20_000):
                seen.add(watched.status() == psutil.STATUS_STOPPED)
                time.sleep(0.003)
                if len(seen) == 2:
                    break
            assert seen == {True, False}
            cycle.end()
            assert watched.status() != psutil.STATUS_STOPPED
        finally:
            process.kill()
