"""Rows and events of a training are readable while it runs, and complete afterwards."""

from __future__ import annotations

import threading
from pathlib import Path

import doors
import pytest
from training_case import SLOW, request

from trainwright.tasks import train
from trainwright.tasks.runs.run import Run
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.train.record import events
from trainwright.tasks.train.record.live import Parts, happened, recorded


def test_rows_are_readable_during_training_and_events_end_up_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"file://{tmp_path}/runs/case/20260101T000001Z-abcdef"
    asked = request(tmp_path, [40, 20], devices=SLOW, epochs=3, checkpoint={"every_steps": 1000})
    asked = asked.model_copy(update={"run_uri": uri})
    monkeypatch.setattr(Run, "work_path", Path(asked.work_folder))
    run, parts = doors.run_at(uri), Parts()
    seen: list[tuple[int, bool]] = []
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(0.02):
            found = recorded(run, parts)
            if found["rows"]:
                seen.append((found["rows"][-1]["step"], any(run.objects.list("metrics/"))))

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        result = train.train(asked)
    finally:
        ended.set()
        follower.join()
    before_the_store = [step for step, stored in seen if not stored]
    assert len(set(before_the_store)) > 3
    assert [step for step, _ in seen] == sorted(step for step, _ in seen)
    found = recorded(run, parts, running=False)
    assert [(row["step"], row["rank"]) for row in found["rows"]] == [
        (step, rank) for step in range(result.steps) for rank in (0, 1)
    ]
    kinds = [event["event"] for event in happened(run, running=False)]
    assert kinds.count("epoch") == 3
    assert {"ranks", "rank", "checkpoint"} <= set(kinds)
    times = [event["at"] for event in happened(run, running=False)]
    assert times == sorted(times)


@pytest.mark.parametrize("kept", [(True, True), (True, False), (False, True)])
def test_a_run_that_moves_between_machines_keeps_the_events_of_all(
    tmp_path: Path, kept: tuple[bool, bool]
) -> None:
    store, expected = FolderStore(tmp_path / "run"), []
    for number, (machine, stored) in enumerate(zip("ab", kept, strict=True)):
        events.fetch(store, tmp_path / machine)
        for epoch in (2 * number, 2 * number + 1):
            events.EventRecorder(tmp_path / machine)({"event": "epoch", "epoch": epoch})
        if stored:  # otherwise the machine died before it could upload
            store.put_file(events.KEY, tmp_path / machine / events.KEY)
        if stored or machine == "a":
            expected += [2 * number, 2 * number + 1]
    events.fetch(store, tmp_path / "a")
    events.EventRecorder(tmp_path / "a")({"event": "epoch", "epoch": 4})
    found = events.parse((tmp_path / "a" / events.KEY).read_bytes())
    assert [one["epoch"] for one in found] == [*expected, 4]
