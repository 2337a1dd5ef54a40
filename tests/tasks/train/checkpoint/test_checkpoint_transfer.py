"""Transfers between a rank on another host and the launcher: parts of checkpoints, and rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as checked
from hypothesis import strategies as st

from trainwright.tasks.errors import BadInput, TrainingFailed
from trainwright.tasks.train.checkpoint.checkpoint_transfer import (
    SentJournal,
    TransferServer,
    fetch_checkpoint,
    send_file,
)
from trainwright.tasks.train.checkpoint.files import CheckpointState
from trainwright.tasks.train.checkpoint.tensors import as_file
from trainwright.tasks.train.record.journal import Journals

NAME = "model-00002-of-00002.safetensors"


def server(folder: Path) -> TransferServer:
    """The server for rank 1."""
    return TransferServer(folder / "work", "mine", 1)


class Channel:
    """A rank's channel to the server."""

    def __init__(self, server: TransferServer) -> None:
        self._server = server

    def ask(self, about: str, **fields: Any) -> dict[str, Any]:
        return self._server.answer({"about": about, **fields})

    def send(self, kind: str, **fields: Any) -> None:
        assert kind == "journal"
        self._server.note(**fields)


@pytest.mark.parametrize("place", ["staging", "spill"])
def test_a_part_arrives_in_the_launchs_staging_folder(tmp_path: Path, place: str) -> None:
    serves = server(tmp_path)
    files = {name: as_file({"w": torch.arange(200_000)}) for name in (NAME, "model.safetensors")}
    for part in ("step-00000120-1", "step-00000140-1"):
        for name, pieces in files.items():
            spill = place == "spill"
            assert send_file(Channel(serves), part, name, pieces, spill=spill) == name  # type: ignore[arg-type]
        paths = [Path(path) for path in serves.paths(part)]
        assert paths == [tmp_path / "work" / place / "mine" / part / name for name in files]
        for path, pieces in zip(paths, files.values(), strict=True):
            assert path.read_bytes() == b"".join(pieces)
        assert serves.paths(part) == []


def test_the_checkpoint_to_resume_from_is_copied_to_the_host(tmp_path: Path) -> None:
    resume = tmp_path / "work" / "resume"
    resume.mkdir(parents=True)
    data = os.urandom(600_000)
    state = CheckpointState(step=3, epoch=0, split=[1, 1])
    state.add_file(NAME, data)
    (resume / NAME).write_bytes(data)
    (resume / "state.json").write_bytes(state.encoded())
    there = fetch_checkpoint(Channel(server(tmp_path)), tmp_path / "there")  # type: ignore[arg-type]
    assert (there / NAME).read_bytes() == data
    assert (there / "state.json").read_bytes() == state.encoded()


def test_a_missing_checkpoint_is_an_error_of_the_rank(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match="No such file"):
        fetch_checkpoint(Channel(server(tmp_path)), tmp_path / "there")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        {"about": "take", "name": "../../secret", "at": 0},
        {"about": "take", "name": "order.json", "at": 0},
        {"about": "take", "name": "state.json", "at": -1},
        {"about": "give", "at": 0, "data": "AAAA"},
        {"about": "give", "part": "step-00000120-1", "file": "../evil", "size": 1},
        {"about": "give", "part": "../evil", "file": NAME, "size": 1},
        {"about": "give", "part": "step-00000120-1", "file": NAME, "size": -1},
        {"about": "give", "part": "step-00000120-1", "file": NAME, "size": 1 << 62},
        {"about": "give", "unknown": 1},
        {"about": "list"},
        {},
    ],
)
def test_an_invalid_request_gets_an_error(message: dict[str, Any], tmp_path: Path) -> None:
    answer = server(tmp_path).answer(message)
    assert set(answer) == {"error"}
    assert answer["error"]["message"]
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


@checked(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None
)
@given(
    st.one_of(
        st.text(), st.integers(max_value=-1), st.booleans(), st.none(), st.floats(allow_nan=True)
    )
)
def test_rows_with_an_invalid_step_are_refused(tmp_path: Path, begins: object) -> None:
    with pytest.raises(BadInput, match=r"journal: rank 1 named step .*; allowed: "):
        server(tmp_path).note(begins=begins, text="evil\n")  # type: ignore[arg-type]
    assert not (tmp_path / "work").exists()


def test_a_rank_notes_its_own_rows(tmp_path: Path) -> None:
    journal = SentJournal(Channel(server(tmp_path)), 1)  # type: ignore[arg-type]
    for step in range(4):
        if step == 2:
            journal.cut()
        journal.add(step=step)
    assert Journals(tmp_path / "work").parts(9) == [
        ("steps-rank1-00000000", [{"step": 0}, {"step": 1}]),
        ("steps-rank1-00000002", [{"step": 2}, {"step": 3}]),
    ]
