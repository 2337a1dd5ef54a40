"""The launcher's side of checkpoints: which are staged, skipped, dropped and uploaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as checked
from hypothesis import strategies as st

from trainwright.tasks.errors import RunHeld, ServiceUnreachable
from trainwright.tasks.spec.train_spec import CheckpointPolicy
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import Content
from trainwright.tasks.train.checkpoint import fence, files, staged, uploader
from trainwright.tasks.train.checkpoint.coordinator import (
    SKIP,
    SPILL,
    WAIT,
    WRITE,
    Coordinator,
)
from trainwright.tasks.train.checkpoint.local_checkpoint import LocalCheckpoint
from trainwright.tasks.train.checkpoint.tensors import as_file
from trainwright.tasks.train.checkpoint.uploader import Uploader, recover
from trainwright.tasks.train.record.journal import StepJournal
from trainwright.tasks.train.record.metrics import read_rows

KEEP_ALL = CheckpointPolicy(keep_last=99)


class Store(FolderStore):
    """A folder that can be unreachable (`away`), and that blocks writes while `gate` is closed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.away, self.gate, self.held = False, threading.Event(), threading.Event()
        self.gate.set()

    def _reach(self) -> None:
        if not self.gate.is_set():
            self.held.set()
        self.gate.wait()
        if self.away:
            raise ServiceUnreachable("the store can't be reached", service="store")

    def create(self, key: str, data: Content, digest: str | None = None) -> bool:
        self._reach()
        return super().create(key, data, digest)

    def swap(
        self, key: str, data: Content, version: str | None, digest: str | None = None
    ) -> str | None:
        self._reach()
        return super().swap(key, data, version, digest)


class RankEnd:
    """The checkpoint side of a rank's process."""

    def __init__(self, number: int, area: staged.StagingArea) -> None:
        self.number, self.area, self.journal = number, area, StepJournal(area.work, number)
        self.under_way: list[int] = []
        self.answers: list[dict[str, Any]] = []

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "release":
            self.under_way.remove(fields["step"])
        else:
            self.answers.append(fields)

    def take(
        self, step: int, *, generation: int = 1, best: bool = False, spill: bool = False
    ) -> dict[str, Any]:
        """Write this rank's shard, filled with the step; returns the rank's report."""
        self.journal.add(step=step - 1, rank=self.number)
        self.journal.cut()
        self.under_way.append(step)
        file = f"model-0000{self.number + 1}-of-00002.safetensors"
        pieces = as_file({f"w{self.number}": torch.full((2,), float(step))})
        name, size = staged.part_name(generation, step), sum(map(len, pieces))
        with self.area.create(name, file, size, spill=spill) as opened:
            opened.writelines(pieces)
        state = vars(files.CheckpointState(step=step, epoch=0, split=[1, 1], best=best))
        report = {"generation": generation, "step": step, "paths": [opened.name]}
        return report | ({"state": state} if self.number == 0 else {})


class Launch:
    """A launch with two ranks."""

    def __init__(self, folder: Path, policy: CheckpointPolicy = KEEP_ALL) -> None:
        self.store, self.work, self.policy = Store(folder / "run"), folder / "work", policy
        self.owner = fence.claim(self.store, None).owner
        self.mine, self.messages = True, list[str]()
        self.area = staged.StagingArea(self.work, self.owner)
        self.uploader = Uploader(
            lambda _: self.store,
            self.area,
            policy,
            stored=0,
            require_mine=self.require_mine,
            report=lambda kind, **fields: self.messages.append(fields.get("message", kind)),
        )
        self.coordinator = Coordinator(
            self.uploader,
            ["here/0", "here/1"],
            policy,
            token=None,
            stop=threading.Event(),
            patience_s=60.0,
        )
        self.stopped = threading.Event()
        self.stopped.set()
        self.ranks = [RankEnd(number, self.area) for number in (0, 1)]
        self.coordinator.begin(1, [0, 1])

    def require_mine(self) -> None:
        if not self.mine:
            raise RunHeld("the lease was lost")

    def report(self, rank: int, report: dict[str, Any]) -> None:
        self.coordinator.part(rank, self.ranks[rank], **report)

    def save(self, step: int, **how: Any) -> None:
        for rank in (0, 1):
            self.report(rank, self.ranks[rank].take(step, **how))

    def choice(self, step: int, *, best: bool = False, required: bool = False) -> int:
        self.coordinator.answer(self.ranks[0], "choose", 3, step=step, best=best, required=required)
        answer = self.ranks[0].answers.pop()
        assert answer.pop("number") == 3
        return int(answer["choice"])

    @property
    def under_way(self) -> list[list[int]]:
        """The checkpoints that each rank considers pending."""
        return [rank.under_way for rank in self.ranks]

    @property
    def steps(self) -> list[int]:
        """The checkpoints in the index."""
        return [one.step for one in fence.read_index(self.store)[0].checkpoints]

    @property
    def staged(self) -> list[int]:
        """The staged checkpoints that the next launch would find."""
        return [one.step for one in self.area.found()]

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, (self.steps, self.messages)
            time.sleep(0.005)

    def notices(self, words: str) -> list[str]:
        return [message for message in self.messages if words in message]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setattr(uploader, "PAUSE_S", 0.05)
    monkeypatch.setattr(uploader, "LONGEST_PAUSE_S", 0.05)
    made = Launch(tmp_path)
    with made.uploader:
        yield made
        made.store.gate.set()


def test_a_checkpoint_is_staged_once_every_rank_has_reported_its_part(launch: Launch) -> None:
    second = launch.ranks[1].take(10)
    launch.report(0, launch.ranks[0].take(10))
    assert launch.coordinator.safe == 0
    launch.report(1, second)
    assert launch.coordinator.safe == 10
    launch.until(lambda: launch.steps == [10])
    (state,) = files.list_states(launch.store)
    assert (state.owner, sorted(state.sha256)) == (
        launch.owner,
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    )
    for rank in (0, 1):
        assert [row["step"] for row in read_rows(launch.store, f"steps-rank{rank}")] == [9]
    launch.until(lambda: launch.under_way == [[], []])
    assert launch.staged == []


def test_a_lost_rank_fails_only_checkpoints_whose_part_it_had_not_reported(launch: Launch) -> None:
    launch.store.gate.clear()
    launch.save(10)
    launch.report(0, launch.ranks[0].take(20))
    launch.coordinator.lost(1)
    launch.store.gate.set()
    launch.until(lambda: launch.steps == [10])
    (notice,) = launch.notices("was not saved")
    assert notice == (
        "the checkpoint of step 20 was not saved; the previous checkpoint remains the newest: "
        "rank 1 was lost before its part was staged"
    )
    launch.until(lambda: launch.under_way == [[], []])
    assert not list(launch.work.glob("*/*/step-*"))


def test_a_part_that_arrives_after_another_rank_was_lost_is_dropped(launch: Launch) -> None:
    launch.coordinator.lost(1)
    launch.report(0, launch.ranks[0].take(10))
    assert launch.under_way == [[], []]
    launch.ranks[1] = RankEnd(1, launch.area)
    launch.coordinator.begin(2, [0, 1])
    launch.save(10, generation=2)
    launch.until(lambda: launch.steps == [10])


def test_a_failed_part_is_reported_with_its_reason_and_the_next_checkpoint_counts(
    launch: Launch,
) -> None:
    launch.report(0, launch.ranks[0].take(10))
    failed = {"paths": [], "failed": "No space left on device"}
    launch.report(1, launch.ranks[1].take(10) | failed)
    said = "was not saved; the previous checkpoint remains the newest: No space"
    assert len(launch.notices(said)) == 1
    assert launch.under_way == [[], []]
    with pytest.raises(ServiceUnreachable, match="step 10 could not be stored: No space left"):
        launch.coordinator.settle()  # as if it was the last one
    launch.save(20)
    launch.coordinator.settle()
    assert launch.steps == [20]


def test_a_checkpoint_with_a_missing_file_is_lost_and_the_next_one_counts(launch: Launch) -> None:
    reports = [rank.take(10) for rank in launch.ranks]
    Path(reports[1]["paths"][0]).unlink()
    for rank in (0, 1):
        launch.report(rank, reports[rank])
    launch.until(lambda: bool(launch.notices("the checkpoint of step 10 is lost: ")))
    launch.save(20)
    launch.until(lambda: launch.steps == [20])


def busy(launch: Launch, newer: dict[str, Any]) -> None:
    """Start the upload of one checkpoint, with a newer one in the queue."""
    launch.store.gate.clear()
    launch.save(10)
    launch.store.held.wait()
    launch.save(20, **newer)


@pytest.mark.parametrize(
    ("newer", "this", "choice", "skipped"),
    [
        ({}, {}, WRITE, 20),
        ({}, {"best": True, "required": True}, WRITE, 20),
        ({"best": True}, {}, SKIP, 30),
        ({"best": True}, {"best": True, "required": True}, WRITE, 20),
        ({"best": True}, {"required": True}, WAIT, None),
    ],
)
def test_with_two_pending_the_queued_one_is_skipped_unless_it_must_be_kept(
    launch: Launch, newer: dict[str, Any], this: dict[str, Any], choice: int, skipped: int | None
) -> None:
    busy(launch, newer)
    assert launch.choice(30, **this) == choice
    assert [message.split()[4] for message in launch.notices("is skipped")] == (
        [str(skipped)] if skipped is not None else []
    )
    assert launch.under_way == [[10] if skipped == 20 else [10, 20]] * 2
    launch.store.gate.set()
    launch.until(lambda: launch.steps == ([10] if skipped == 20 else [10, 20]))


def test_a_checkpoint_to_be_kept_for_good_is_not_skipped(tmp_path: Path) -> None:
    launch = Launch(tmp_path, CheckpointPolicy(every_steps=10, keep_every=20))
    with launch.uploader:
        busy(launch, {})
        assert launch.choice(30) == SKIP
        assert launch.choice(40, required=True) == WAIT
        launch.store.gate.set()
        launch.until(lambda: launch.steps == [10, 20])
        assert launch.choice(40, required=True) == WRITE


def test_a_checkpoint_with_missing_parts_can_be_skipped_and_a_late_part_is_released(
    launch: Launch,
) -> None:
    launch.store.gate.clear()
    launch.save(10)
    launch.report(0, launch.ranks[0].take(20))
    late = launch.ranks[1].take(20)
    assert launch.choice(30) == WRITE
    launch.report(1, late)
    assert launch.under_way == [[10], [10]]
    launch.save(30)
    launch.store.gate.set()
    launch.until(lambda: launch.steps == [10, 30])


def test_during_an_outage_checkpoints_are_kept_on_disk_by_the_policy_and_uploaded_in_order_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "PAUSE_S", 0.05)
    monkeypatch.setattr(uploader, "LONGEST_PAUSE_S", 0.05)
    launch = Launch(tmp_path, CheckpointPolicy(keep_last=2, keep_best=True))
    with launch.uploader:
        launch.store.away = True
        launch.save(10, best=True)
        launch.until(lambda: launch.uploader.is_away)
        launch.save(20)
        for step in (30, 40):
            assert launch.choice(step) == SPILL
            launch.save(step, spill=True)
        launch.until(lambda: launch.under_way == [[10, 30, 40]] * 2)
        assert launch.staged == [10, 30, 40]
        marks = [launch.area.disk / f"step-000000{step}-1.json" for step in (30, 40)]
        launch.until(lambda: all('"boot": null' in mark.read_text() for mark in marks))
        assert launch.steps == []
        launch.store.away = False
        launch.until(lambda: bool(launch.notices("the store is back")))
        assert launch.steps == [10, 30, 40]
        assert [message for message in launch.messages if message == "checkpoint"] == [
            "checkpoint"
        ] * 3
        assert not list(launch.work.glob("*/*/step-*"))
        for rank in (0, 1):
            stored = [row["step"] for row in read_rows(launch.store, f"steps-rank{rank}")]
            assert stored == [9, 19, 29, 39]
        assert len(launch.notices("until it is back, checkpoints are kept in")) == 1


def test_if_the_store_stays_away_the_missing_checkpoint_is_reported_and_the_next_start_uploads_it(
    launch: Launch,
) -> None:
    launch.store.away = True
    launch.save(10)
    launch.until(lambda: launch.uploader.is_away)
    launch.uploader.settle(launch.stopped, 0.0)
    (notice,) = launch.notices("start again on this machine")
    assert notice.startswith("the checkpoint of step 10 could not be stored: the store can't be")
    with pytest.raises(ServiceUnreachable, match="start again on this machine"):
        launch.uploader.settle(threading.Event(), 0.0)
    launch.uploader.__exit__()
    assert recover(FolderStore(launch.store.root), launch.work, KEEP_ALL) == [10]


def test_going_back_uploads_staged_checkpoints_and_drops_incomplete_ones(launch: Launch) -> None:
    launch.save(10)
    launch.report(0, launch.ranks[0].take(20))
    launch.coordinator.answer(launch.ranks[0], "back", 5)
    launch.until(lambda: bool(launch.ranks[0].answers))
    (answer,) = launch.ranks[0].answers
    assert answer["checkpoint"] is not None
    found = LocalCheckpoint(Path(answer["checkpoint"]))
    state, model = found.state, found.tensors(files.MODEL)
    assert (state.step, model["w1"].tolist()) == (10, [10.0, 10.0])
    assert launch.coordinator.safe == 10
    assert launch.under_way == [[], []]
    launch.save(20)
    launch.until(lambda: launch.steps == [10, 20])


def test_a_launch_whose_lease_is_lost_uploads_nothing_more(launch: Launch) -> None:
    launch.mine = False
    launch.save(10)
    with pytest.raises(RunHeld, match="the lease was lost"):
        launch.coordinator.settle()
    with pytest.raises(RunHeld):
        launch.coordinator.check()
    assert launch.steps == []


def test_a_launch_adds_nothing_after_another_has_taken_over(launch: Launch) -> None:
    fence.claim(launch.store, None)
    launch.save(10)
    with pytest.raises(RunHeld, match="taken over"):
        launch.coordinator.settle()
    assert launch.steps == []


EVENTS = st.lists(
    st.sampled_from(["take 0", "take 1", "lose 0", "lose 1", "away", "back", "pause"]), max_size=30
)


@checked(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None
)
@given(EVENTS)
def test_after_any_events_exactly_the_complete_checkpoints_count(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    monkeypatch.setattr(uploader, "PAUSE_S", 0.01)
    monkeypatch.setattr(uploader, "LONGEST_PAUSE_S", 0.01)
    launch = Launch(tmp_path_factory.mktemp("launch"))
    at, whole, generation = [0, 0], set[int](), 1
    with launch.uploader:
        for event in events:
            what, _, number = event.partition(" ")
            rank = int(number or 0)
            if what == "take":
                at[rank] += 10
                launch.report(rank, launch.ranks[rank].take(at[rank], generation=generation))
                whole |= {at[rank]} if at[1 - rank] >= at[rank] else set()
            elif what == "lose":
                launch.coordinator.lost(rank)
                launch.ranks[rank] = RankEnd(rank, launch.area)
                generation, at = generation + 1, [max(at)] * 2
                launch.coordinator.begin(generation, [0, 1])
            elif what == "pause":
                time.sleep(0.01)
            else:
                launch.store.away = what == "away"
        launch.store.away = False
        launch.uploader.settle(launch.stopped, 60.0)
        for rank in (0, 1):
            launch.coordinator.lost(rank)
        assert set(launch.steps) == whole
        assert launch.under_way == [[], []]
        assert not list(launch.work.glob("*/*/step-*"))
    launch.store.gate.set()
