"""What ranks on other hosts keep, they keep by way of the launcher: the run's store, their journals, what waits for the store.

So a host needs neither the store's keys nor a way to it (the embedded S3 server and folders are on the launcher's machine only),
and what a lost host had noted is not lost with it. `*_of` say where a rank keeps each, wherever it runs.
"""

from __future__ import annotations

import base64
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from trainwright.tasks.errors import BadInput, TrainingFailed, TrainwrightError, from_document
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import Content, ObjectInfo, ObjectStore
from trainwright.tasks.train.channel import Channel
from trainwright.tasks.train.checkpoint.spill import Spill, folder_of
from trainwright.tasks.train.record.journal import FileJournal, Journal
from trainwright.tasks.train.record.journal import journal_of as local_journal
from trainwright.tasks.train.request import Order

ABOUT = "store"
JOURNAL = "journal"
_PIECE_BYTES = 1 << 18
_RUN: Final = "run"
_SPILL: Final = "spill"
_log = logging.getLogger(__name__)


def store_of(order: Order, channel: Channel, patience_s: float | None = None) -> ObjectStore:
    """The run's store; `patience_s` as in `open_store`."""
    if order.launcher_work is None:
        return order.request.store(patience_s=patience_s)
    return LauncherStore(channel, _RUN, patience_s)


def journal_of(order: Order, channel: Channel, rank: int) -> Journal:
    """The journal of a rank's steps."""
    if order.launcher_work is None:
        return local_journal(Path(order.request.work_folder), rank)
    return LauncherJournal(channel, rank)


def spill_of(order: Order, channel: Channel, rank: int) -> Spill:
    """Where a rank's files wait for the store."""
    if order.launcher_work is None:
        return Spill(Path(order.request.work_folder), rank)
    return Spill(Path(order.launcher_work), rank, LauncherStore(channel, _SPILL, None))


class LauncherStore:
    """An ObjectStore that the launcher serves over the channel."""

    uri = "the run's store"

    def __init__(
        self, channel: Channel, area: Literal["run", "spill"], patience_s: float | None
    ) -> None:
        self._channel, self._area, self._patience_s = channel, area, patience_s
        self._uploads = itertools.count()

    def _call(self, do: str, **fields: Any) -> Any:
        answer = self._channel.ask(
            ABOUT, do=do, area=self._area, patience_s=self._patience_s, **fields
        )
        return _value(answer)

    def get(self, key: str) -> bytes:
        return self.get_versioned(key)[0]

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        found = self._call("get", key=key)
        if found is None:
            raise FileNotFoundError(key)
        whole = bytearray()
        while piece := self._call("take", part=found["part"], at=len(whole)):
            whole += base64.b64decode(piece)
        return bytes(whole), found["version"]

    def put(self, key: str, data: Content) -> None:
        self._call("put", key=key, part=self._upload(data))

    def create(self, key: str, data: Content, digest: str | None = None) -> bool:
        return bool(self._call("create", key=key, part=self._upload(data), digest=digest))

    def swap(
        self, key: str, data: Content, version: str | None, digest: str | None = None
    ) -> str | None:
        mark: str | None = self._call(
            "swap", key=key, part=self._upload(data), version=version, digest=digest
        )
        return mark

    def _upload(self, data: Content) -> str:
        part = f"up-{self._area}-{threading.get_ident()}-{next(self._uploads)}"
        for at in range(0, len(data), _PIECE_BYTES):
            self._call(
                "give", part=part, data=base64.b64encode(data[at : at + _PIECE_BYTES]).decode()
            )
        return part

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get_file(self, key: str, path: Path) -> None:
        path.write_bytes(self.get(key))

    def delete(self, *keys: str) -> None:
        self._call("delete", keys=keys)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from (ObjectInfo(**item) for item in self._call("list", key=prefix))

    def folders(self, prefix: str = "") -> Iterator[str]:
        yield from self._call("folders", key=prefix)


def _value(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise from_document(answer["error"])
    return answer["value"]


class LauncherJournal:
    """A journal that the launcher writes as it is told, and reads."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel, self._rank = channel, rank

    def read(self) -> str | None:
        text: str | None = _value(self._channel.ask(ABOUT, do=JOURNAL, rank=self._rank))
        return text

    def append(self, text: str) -> None:
        self._channel.send(JOURNAL, rank=self._rank, text=text, anew=False)

    def replace(self, text: str) -> None:
        self._channel.send(JOURNAL, rank=self._rank, text=text, anew=True)

    def close(self) -> None:
        return


class StoreServer:
    """The launcher's side, for one rank. Its answers may take as long as the store has patience."""

    def __init__(self, order: Order, rank: int) -> None:
        self._order, self._work, self._rank = order, Path(order.request.work_folder), rank
        self._stores: dict[tuple[str, float | None], ObjectStore] = {}
        self._parts: dict[str, bytearray] = {}
        self._numbers = itertools.count()

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """What to answer a question about the store: `value` or `error`."""
        try:
            return {"value": self._do(**message)}
        except TrainwrightError as error:
            return {"error": error.document()}
        except OSError as error:
            return {"error": TrainingFailed(f"the run's store: {error}").document()}
        except Exception as error:  # noqa: BLE001 - a thread's boundary: logged, and the rank that waits is told
            _log.exception("the run's store: rank %d asked for what could not be done", self._rank)
            return {
                "error": TrainingFailed(
                    f"the run's store: {type(error).__name__}: {error}"
                ).document()
            }

    def note(self, message: dict[str, Any]) -> None:
        """A rank has something for a journal. Raises BadInput where there is no such rank's."""
        journal = self._journal(message["rank"])
        (journal.replace if message["anew"] else journal.append)(message["text"])
        journal.close()

    def _journal(self, rank: Any) -> FileJournal:
        """The journal of a rank of this launch: its own, or that of one that was lost. What a host says names no other file."""
        count = len(self._order.request.plan.devices)
        if type(rank) is not int or not 0 <= rank < count:
            raise BadInput(
                f"journal: rank {self._rank} named {rank!r}; allowed: a rank, 0 to {count - 1}"
            )
        return local_journal(self._work, rank)

    def _store(self, area: str, patience_s: float | None) -> ObjectStore:
        if (area, patience_s) not in self._stores:
            self._stores[area, patience_s] = (
                FolderStore(folder_of(self._work, self._rank))
                if area == _SPILL
                else self._order.request.store(patience_s=patience_s)
            )
        return self._stores[area, patience_s]

    def _do(
        self,
        do: str,
        area: str = "",
        patience_s: float | None = None,
        key: str = "",
        part: str = "",
        data: str = "",
        at: int = 0,
        version: str | None = None,
        digest: str | None = None,
        keys: Sequence[str] = (),
        rank: int = -1,
    ) -> Any:
        if do == JOURNAL:
            return self._journal(rank).read()
        if do == "give":
            self._parts.setdefault(part, bytearray()).extend(base64.b64decode(data))
            return None
        if do == "take":
            piece = self._parts[part][at : at + _PIECE_BYTES]
            if not piece:
                del self._parts[part]
            return base64.b64encode(piece).decode()
        store = self._store(area, patience_s)
        if do in ("put", "create", "swap"):
            whole = bytes(self._parts.pop(part, b""))
            if do == "swap":
                return store.swap(key, whole, version, digest)
            return store.put(key, whole) if do == "put" else store.create(key, whole, digest)
        if do == "get":
            try:
                found, mark = store.get_versioned(key)
            except FileNotFoundError:
                return None
            part = f"down-{next(self._numbers)}"
            self._parts[part] = bytearray(found)
            return {"part": part, "version": mark}
        if do == "delete":
            return store.delete(*keys)
        if do == "list":
            return [{"key": one.key, "size": one.size, "etag": one.etag} for one in store.list(key)]
        return list(store.folders(key))
