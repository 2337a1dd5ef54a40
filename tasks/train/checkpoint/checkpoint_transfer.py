"""Moves the files of a rank on another host to and from the launcher's machine: its rows, its parts
of checkpoints, and the checkpoint from which it resumes.

So a host needs neither the store's keys nor access to the store, and nothing that a lost host has
reported is lost. The rank asks over its channel:

| `about` | | answer |
|---|---|---|
| give | part, file, size, spill: the next file of a part | |
| give | at, data: a piece of it | |
| take | name, at: a piece of a file of the checkpoint to resume from | data |

`journal` messages (begins, text) are rows and have no answer. Pieces are base64.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from trainwright.tasks.errors import BadInput, TrainingFailed, TrainwrightError, from_document
from trainwright.tasks.storage.objects import Content
from trainwright.tasks.train.channel import Channel
from trainwright.tasks.train.checkpoint.fence import STATE
from trainwright.tasks.train.checkpoint.files import FILE, parsed
from trainwright.tasks.train.checkpoint.staged import RESUME, StagingArea
from trainwright.tasks.train.record.journal import StepJournal, segment_path

GIVE, TAKE, JOURNAL = "give", "take", "journal"
_PIECE_BYTES = 1 << 18
_PART = re.compile(r"^step-\d{8,}-\d+$")
_log = logging.getLogger(__name__)


# -- the rank's end --------------------------------------------------------------------------------


def _ask(channel: Channel, about: str, **fields: Any) -> Any:
    answer = channel.ask(about, **fields)
    if "error" in answer:
        raise from_document(answer["error"])
    return answer["value"]


def send_file(channel: Channel, part: str, file: str, pieces: list[Content], *, spill: bool) -> str:
    """Let the launcher write a file of a part. Returns its name. Raises the launcher's error."""
    size, at = sum(map(len, pieces)), 0
    _ask(channel, GIVE, part=part, file=file, size=size, spill=spill)
    for piece in pieces:
        for begins in range(0, len(piece), _PIECE_BYTES):
            data = piece[begins : begins + _PIECE_BYTES]
            _ask(channel, GIVE, at=at, data=base64.b64encode(data).decode())
            at += len(data)
    return file


def fetch_checkpoint(channel: Channel, into: Path) -> Path:
    """Copy the checkpoint to resume from into a folder of this host."""
    into.mkdir(parents=True, exist_ok=True)
    _fetch(channel, into / STATE)
    for name in parsed((into / STATE).read_bytes()).sha256:
        _fetch(channel, into / name)
    return into


def _fetch(channel: Channel, path: Path) -> None:
    with path.open("wb") as file:
        while piece := base64.b64decode(_ask(channel, TAKE, name=path.name, at=file.tell())):
            file.write(piece)


class SentJournal(StepJournal):
    """The journal of a rank on another host. The launcher writes the file."""

    def __init__(self, channel: Channel, rank: int) -> None:
        super().__init__(Path(), rank)
        self._channel = channel

    def _append(self, begins: int, text: str) -> None:
        self._channel.send(JOURNAL, begins=begins, text=text)


# -- the launcher's end ----------------------------------------------------------------------------


class TransferServer:
    """The launcher's end for one process of a rank. A host can access only the files named here."""

    def __init__(self, work: Path, launch: str | None, rank: int) -> None:
        self._work, self._rank = work, rank
        self._area = StagingArea(work, launch or "")
        self._writing: BinaryIO | None = None
        self._written: dict[str, list[str]] = {}
        """the files of each part"""

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a question: `value`, or `error` if it can't be answered."""
        try:
            return {"value": _DO[message.pop("about")](self, **message)}
        except TrainwrightError as error:
            return {"error": error.document()}
        except Exception as error:  # noqa: BLE001 - a thread's boundary: logged and reported
            _log.exception("rank %d: its request failed", self._rank)
            why = f"the launcher: {type(error).__name__}: {error}"
            return {"error": TrainingFailed(why).document()}

    def _give(
        self,
        part: str = "",
        file: str = "",
        size: int = 0,
        at: int = 0,
        data: str | None = None,
        *,
        spill: bool = False,
    ) -> None:
        if data is not None:
            assert self._writing is not None
            self._writing.seek(at)
            self._writing.write(base64.b64decode(data))
            return
        _require(_PART.match(part) and FILE.match(file), f"rank {self._rank} gave {part}/{file}")
        self._close()
        self._writing = self._area.create(part, file, size, spill=spill)
        self._written.setdefault(part, []).append(self._writing.name)

    def _take(self, name: str, at: int) -> str:
        _require(name == STATE or FILE.match(name), f"rank {self._rank} took {name!r}")
        with (self._work / RESUME / name).open("rb") as file:
            file.seek(at)
            return base64.b64encode(file.read(_PIECE_BYTES)).decode()

    def note(self, begins: int, text: str) -> None:
        """Add rows to the rank's journal. Raises BadInput if they name no step."""
        known = type(begins) is int and begins >= 0
        _require(known, f"journal: rank {self._rank} named step {begins!r}")
        path = segment_path(self._work, self._rank, begins)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def paths(self, part: str) -> list[str]:
        """The paths of the files of a part that the rank has sent."""
        self._close()
        return self._written.pop(part, [])

    def _close(self) -> None:
        if self._writing is not None:
            self._writing.close()
        self._writing = None


def _require(known: object, what: str) -> None:
    if not known:
        raise BadInput(f"{what}; allowed: the names that this rank's launch uses")


_DO: dict[str, Callable[..., Any]] = {GIVE: TransferServer._give, TAKE: TransferServer._take}
