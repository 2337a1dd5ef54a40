"""Trainings of layouts with real ranks: exact, with both libraries; ranks that are killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, get_args

import pytest
from emulated_case import curve, emulated_costs
from joint_batch_case import BOUNDS, largest_difference
from layout_ranks import with_layout
from training_case import NO_SPARE, SLOW, alone, ranks, request, when_checkpoint

from trainwright.estimator.predict.communication import Link
from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.step_simulator import StepSimulator
from trainwright.tasks.allocate.layouts.averages import AverageTimes
from trainwright.tasks.allocate.layouts.predicted_kinds import by_kind
from trainwright.tasks.runs.artefacts.step_kinds import ComputeKind
from trainwright.tasks.train import search, train

LAYOUTS: dict[str, dict[str, Any]] = {
    "late-multiply": {"sync": {"out": "factors"}},
    "sharded": {"sync": {"out": "rows"}, "rows": {"out": [7, 3]}},
}


@pytest.mark.parametrize(
    ("layout", "backend"), [("late-multiply", "horovod"), ("sharded", "torch")]
)
def test_real_ranks_equal_one_process_with_evaluations_and_checkpoints_between(
    tmp_path: Path, layout: str, backend: str
) -> None:
    asked = request(
        tmp_path,
        [40, 20],
        validation_fraction=1100 / 1797,
        epochs=2,
        backend=backend,
        precision="fp64",
        optimizer={"name": "adamw", "weight_decay": 0.1},
        **NO_SPARE,
    )
    metrics: list[dict[str, float]] = []
    expected = alone(asked, metrics=metrics)
    result = train(with_layout(asked, **LAYOUTS[layout]))
    assert largest_difference(tmp_path / "run", result.steps, expected) <= BOUNDS["fp64"]
    assert result.metrics["loss"] == pytest.approx(metrics[-1]["loss"], rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        ("late-multiply", "horovod"),
        ("sharded", "torch"),
        ("data-parallel", "torch"),
        ("averaging", "horovod"),
    ],
)
def test_the_result_has_all_kinds_of_actions_and_the_bytes_that_were_predicted(
    tmp_path: Path, layout: str, backend: str
) -> None:
    asked = request(
        tmp_path, [40, 20], validation_fraction=1497 / 1797, backend=backend, **NO_SPARE
    )
    # An epoch has five steps, so only its end and the checkpoint average.
    often = {"average_every": 1000} if layout == "averaging" else {}
    asked = with_layout(asked, **LAYOUTS.get(layout, {"sync": {}}), **often)
    chosen, facts = asked.plan.layout, asked.plan.layers
    assert chosen is not None
    link = {"here": Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5, spread=0.0)}
    costs = emulated_costs([one.name for one in facts])
    network = RankNetwork(("here", "here"), link, link)
    step = StepSimulator(facts, [curve(costs, 1.0)] * 2, network)(chosen)
    found = train(asked).measured.by_kind
    averages = AverageTimes.of(asked.job.train, 300, asked.plan.global_batch_size)
    for measured, predicted in zip(found, by_kind(step, chosen, facts, averages), strict=True):
        assert measured.device == predicted.device
        assert set(measured.compute_s) == set(get_args(ComputeKind))
        assert all(measured.compute_s[kind] > 0 for kind in ("forward", "backward", "update"))
        assert all(measured.wait_s[kind] > 0 for kind in predicted.wait_s)
        own, expected = measured.sent_bytes, predicted.sent_bytes
        headers = own["transfer"] - expected["transfer"]
        assert (0 < headers < 2000) if chosen.has_transfers else headers == 0
        # Parameters without a layer are summed too; the step's figures are at most 1 KiB.
        assert abs(own["sum"] - expected["sum"]) <= 1024


def test_a_search_for_the_learning_rate_trains_sharded_layers(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 20], backend="torch", precision="fp64", **NO_SPARE)
    rates = [0.01 * 1.5**step for step in range(16)]  # the loss diverges
    sharded = search(with_layout(asked, **LAYOUTS["sharded"]), rates, 3)
    plain = search(asked, rates, 3)
    assert sharded.trials
    assert [one.model_dump() for one in sharded.points] == [
        pytest.approx(one.model_dump(), rel=1e-9) for one in plain.points
    ]
    assert [one.model_dump() for one in sharded.trials] == [
        pytest.approx(one.model_dump(), rel=1e-9) for one in plain.trials
    ]


def test_real_ranks_average_and_learn(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 20], epochs=4, backend="torch", **NO_SPARE)
    result = train(with_layout(asked, {}, average_every=4, local_batch=20))
    together = request(tmp_path / "together", [40, 20], epochs=4, backend="torch", **NO_SPARE)
    assert result.steps == 96
    expected: list[dict[str, float]] = []
    alone(together, metrics=expected)
    # Three updates of 20 samples instead of one of 60: it learns faster for each sample.
    assert result.metrics["loss"] < expected[-1]["loss"]


def test_after_a_killed_rank_the_training_goes_on_and_ends(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 20], epochs=2, backend="torch", devices=SLOW)
    killed = when_checkpoint(tmp_path, 5, lambda: ranks()[1].send_signal(signal.SIGKILL))
    result = train(with_layout(asked, **LAYOUTS["late-multiply"]))
    killed.join()
    assert result.steps == 48
    assert any("rank 1" in one.reason for one in result.split_events)
    undisturbed: list[dict[str, float]] = []
    alone(asked, metrics=undisturbed)
    assert result.metrics["loss"] == pytest.approx(undisturbed[-1]["loss"], rel=1e-3)


AVERAGING: dict[str, Any] = {"average_every": 4, "local_batch": 20, "outer": "nesterov"}


def test_after_a_killed_rank_averaging_goes_on_and_ends(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 20], epochs=3, backend="torch", devices=SLOW)
    killed = when_checkpoint(tmp_path, 5, lambda: ranks()[1].send_signal(signal.SIGKILL))
    result = train(with_layout(asked, {}, **AVERAGING))
    killed.join()
    assert result.steps == 72
    assert any("rank 1" in one.reason for one in result.split_events)
    assert result.metrics["accuracy"] > 0.85
