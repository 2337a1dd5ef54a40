"""What a rank's steps take, by kind of action."""

from __future__ import annotations

import time
from typing import get_args

import pytest
import torch

from trainwright.tasks.runs.artefacts.step_kinds import (
    ComputeKind,
    SentKind,
    StepByKind,
    WaitKind,
    mean_by_kind,
)
from trainwright.tasks.train.exchange.peers import Peers
from trainwright.tasks.train.record.step_actions import MOST_STEPS, StepActions


def test_a_step_is_divided_into_what_was_done() -> None:
    peers = Peers("torch")
    actions = StepActions(peers, torch.device("cpu"))
    for step in range(3):
        actions.begin()
        started, waited_s = time.perf_counter(), 0.25 * step
        time.sleep(0.01)
        peers.wait_s += waited_s
        actions.done("forward", "exchange")
        actions.done(None)
        actions.done("update")
        actions.end(time.perf_counter() - started + 1.0)
    found = StepByKind(device="here/0", **(actions.summary() or {}))
    assert set(found.compute_s) == set(get_args(ComputeKind))
    assert set(found.wait_s) == set(get_args(WaitKind))
    assert set(found.sent_bytes) == set(get_args(SentKind))
    assert found.wait_s["exchange"] == pytest.approx(0.25)
    assert found.wait_s["sum"] == found.compute_s["backward"] == 0.0
    assert found.compute_s["loop"] == pytest.approx(1.0, abs=0.5)
    assert found.compute_s["update"] >= 0.0


def test_what_few_steps_do_is_the_mean_and_old_steps_are_forgotten() -> None:
    peers = Peers("torch")
    actions = StepActions(peers, torch.device("cpu"))
    assert actions.summary() is None
    for step in range(2 * MOST_STEPS):
        actions.begin()
        peers.wait_s += 8.0 if step % 4 == 0 else 0.0
        actions.done("late gradient", "gather")
        peers.ring_bytes += 100.0 if step < MOST_STEPS else 300.0
        actions.end(0.0)
    summary = actions.summary()
    assert summary is not None
    assert summary["wait_s"]["gather"] == pytest.approx(2.0)
    assert summary["sent_bytes"] == {"sum": 300.0, "transfer": 0.0}


def test_averages_are_the_mean_of_all_steps_and_count_between_steps_too() -> None:
    peers = Peers("torch")
    actions = StepActions(peers, torch.device("cpu"))

    def average(size: float) -> None:
        with actions.averaging():
            peers.wait_s += 5.0
            peers.ring_bytes += size

    for step in range(10):
        actions.begin()
        peers.ring_bytes += 8.0
        actions.done("update", "agree")
        if step % 4 == 3:
            average(100.0)
        actions.end(0.0, whole=step != 9)  # the last one of an epoch is smaller
    average(300.0)  # at the end of the epoch
    summary = actions.summary()
    assert summary is not None
    assert summary["wait_s"]["average"] == pytest.approx(3 * 5.0 / 10)
    assert summary["wait_s"]["agree"] == 0.0
    assert summary["sent_bytes"]["sum"] == pytest.approx(8.0 + 500.0 / 10)


def test_the_table_has_the_mean_over_devices() -> None:
    pair = [
        StepByKind(device=name, compute_s={"forward": value}, wait_s={}, sent_bytes={"sum": 8.0})
        for name, value in (("a", 1.0), ("b", 3.0))
    ]
    means = mean_by_kind(pair)
    assert means["compute_s", "forward"] == 2.0
    assert means["sent_bytes", "sum"] == 8.0
    assert means["wait_s", "agree"] == 0.0
    assert mean_by_kind([]) == {}


def test_a_stages_passes_of_the_latest_step_begin_after_their_waits() -> None:
    peers = Peers("torch")
    actions = StepActions(peers, torch.device("cpu"))
    for number in range(2):
        actions.begin()
        time.sleep(0.01)
        peers.wait_s += 0.004
        actions.done("forward", "exchange", ("forward", number))
        time.sleep(0.01)
        actions.done("backward", "exchange", ("input-gradient", number))
        actions.done("update")
        actions.end(0.0)
    summary = actions.summary()
    found = StepByKind(device="here/0", **(summary or {})).passes
    assert [(one.kind, one.micro_batch) for one in found] == [
        ("forward", 1),
        ("input-gradient", 1),
    ]
    assert 0.004 - 1e-6 <= found[0].begin_s < found[0].end_s <= found[1].begin_s
    assert found[1].end_s - found[1].begin_s >= 0.01 - 1e-6
