"""`POST /recommendations` of a real service: the command line's answer, its limits and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doors
import pytest
from serving import READ, client, serving
from small_jobs import table_job, write_table

from trainwright.tasks.recommend.step import recommend

POOL = {
    "name": "sent",
    "hosts": [
        {
            "name": "a",
            "address": "10.0.0.1",
            "devices": [{"type": "nvidia-t4"}],
        }
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    write_table(made / "table.csv")
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with serving(folder / "home", "--workers", "1", "--allow", str(folder)) as found:
        yield found


def asked(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"name": "small", "pool": POOL, "data": {"uri": str(folder / "table.csv")}} | fields


def test_the_answer_is_that_of_the_command_line(
    address: str, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(address) as run:
        answer = run.post("/recommendations", json=asked(folder, train={"epochs": 3}))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    monkeypatch.setenv("TRAINWRIGHT_STORE", (folder / "store").as_uri())
    (folder / "sent.json").write_text(json.dumps(POOL))
    job = table_job(folder, pool=str(folder / "sent.json"), train={"epochs": 3})
    same = recommend(job, doors.settings()).document("small")
    for document in (found, same):
        document["notes"] = document["reference"]["duration_s"] = None  # has measured seconds
        document["reason"] = re.sub(r"[\d.]+ m?s\)", ")", document["reason"])
    assert found == same


def test_data_is_prepared_once_and_that_of_a_refused_job_not_at_all(
    address: str, folder: Path
) -> None:
    def prepared() -> dict[str, int]:
        made = (folder / "home" / "prepared").glob("*/targets.npy")
        return {one.parent.name: one.stat().st_mtime_ns for one in made}

    with client(address) as run:
        first = run.post("/recommendations", json=asked(folder, recommend={"top": 1}))
        assert first.status_code == 200, first.text
        made = prepared()
        again = run.post("/recommendations", json=asked(folder, recommend={"top": 2}))
        assert again.status_code == 200, again.text
        few = write_table(folder / "few.csv", rows=8)
        refused = run.post("/recommendations", json=asked(folder, data={"uri": str(few)}))
    assert refused.status_code == 422
    assert len(made) == 1
    assert prepared() == made


def test_a_reader_and_a_probe_are_refused_and_an_impossible_deadline_is_an_answer(
    address: str, folder: Path
) -> None:
    with client(address, READ) as reader:
        assert reader.post("/recommendations", json=asked(folder)).status_code == 403
    with client(address) as run:
        probe = run.post("/recommendations", json=asked(folder, recommend={"probe": True}))
        assert probe.status_code == 422
        assert "recommend.probe" in probe.json()["error"]["message"]
        late = run.post("/recommendations", json=asked(folder, objective={"deadline": "1us"}))
        assert late.status_code == 200
        assert late.json()["feasible"] is False
        assert late.json()["error"]["nearest_deadline_s"] > 0
        hidden = run.post("/recommendations", json=asked(folder, data={"uri": "/etc/passwd"}))
        assert hidden.status_code == 422
