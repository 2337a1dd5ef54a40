"""Fencing: an index, checkpoints.json, lists the valid checkpoints and the launch that may add.

A checkpoint exists if the index lists it. The index is only changed by compare-and-swap. Each
launch of a training first writes its own name (`owner`) there, with the fencing token of its lease.
So a launch that was suspended beyond the end of its lease can do no harm: its swaps fail, its files
are not listed, and it can't replace its successor's files. For a run without an index, one is built
from the checkpoints in its folder.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from trainwright.tasks.errors import RunHeld, ServiceUnreachable
from trainwright.tasks.spec.train_spec import CheckpointPolicy
from trainwright.tasks.storage.objects import Content, ObjectStore, sha256

FOLDER = "checkpoints/"
INDEX = "checkpoints.json"
STATE = "state.json"
_STEP = re.compile(r"^checkpoints/step-(\d{8,})/(.+)$")
_TRIES = 5
_log = logging.getLogger(__name__)


def folder_name(step: int) -> str:
    """The folder of the checkpoint after this many steps."""
    return f"{FOLDER}step-{step:08d}"


@dataclass(frozen=True)
class Entry:
    """A checkpoint in the index: SHA-256 of its state.json; `best`: the best when it was taken."""

    step: int
    sha256: str
    best: bool = False


@dataclass(frozen=True)
class Index:
    """The valid checkpoints by step, and the launch that may add to them."""

    owner: str = ""
    token: int = 0
    checkpoints: list[Entry] = field(default_factory=list)
    schema_version: int = 1

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        return max((one.step for one in self.checkpoints), default=0)

    def encoded(self) -> bytes:
        """The file's bytes."""
        return json.dumps(asdict(self), indent=1).encode()


def read_index(store: ObjectStore) -> tuple[Index, str | None]:
    """The index and its version; without an index, one built from the folder, and None."""
    try:
        data, version = store.get_versioned(INDEX)
    except FileNotFoundError:
        return _of_what_is_there(store), None
    try:
        found = json.loads(data)
        entries = [
            Entry(int(one["step"]), str(one["sha256"]), bool(one["best"]))
            for one in found["checkpoints"]
        ]
        entries.sort(key=lambda one: one.step)
        return Index(str(found["owner"]), int(found["token"]), entries), version
    except (ValueError, TypeError, KeyError) as error:
        _log.warning("%s/%s is damaged; all checkpoints there count: %r", store.uri, INDEX, error)
        return _of_what_is_there(store), version


def _of_what_is_there(store: ObjectStore) -> Index:
    entries, newest = [], 0
    for step, names in sorted(_folders(store).items()):
        if STATE in names:
            data = store.get(f"{folder_name(step)}/{STATE}")
            try:
                state = json.loads(data)
                best, token = state.get("best") is True, int(state.get("token") or newest)
            except (ValueError, TypeError, AttributeError):
                best, token = False, newest  # the damage is reported when it is read
            if token < newest:
                continue  # written by a launch that another one had replaced at an earlier step
            newest = token
            entries.append(Entry(step, sha256(data), best))
    return Index(checkpoints=entries)


def _folders(store: ObjectStore) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for item in store.list(f"{FOLDER}step-"):
        if match := _STEP.match(item.key):
            found.setdefault(int(match[1]), []).append(match[2])
    return found


def retained(entries: list[Entry], policy: CheckpointPolicy) -> list[Entry]:
    """The checkpoints that the policy keeps: the last, the newest best, and every `keep_every`."""
    ordered = sorted(entries, key=lambda one: one.step)
    keep = {one.step for one in ordered[-policy.keep_last :]}
    if policy.keep_best:
        keep |= {one.step for one in [one for one in ordered if one.best][-1:]}
    if policy.keep_every is not None:
        keep |= {one.step for one in ordered if one.step % policy.keep_every == 0}
    return [one for one in ordered if one.step in keep]


class Fence:
    """One launch's right to add checkpoints. It ends when another launch claims it."""

    def __init__(self, store: ObjectStore, owner: str) -> None:
        self.store, self.owner = store, owner
        self._known: tuple[Index, str] | None = None
        """the index and version that this launch last wrote; valid until another launch writes"""
        self._files: dict[int, list[str]] | None = None
        """the files of each checkpoint in the store; None: list them at the next commit"""

    def require(self) -> Index:
        """Read the index. Raises RunHeld if it belongs to another launch."""
        index, _ = read_index(self.store)
        self._check(index)
        return index

    def _check(self, index: Index) -> None:
        if index.owner != self.owner:
            raise RunHeld(
                f"{self.store.uri}: another launch of this training has taken over (lease token "
                f"{index.token}); the work of this launch since then is discarded"
            )

    def put(self, key: str, data: Content, digest: str | None = None) -> None:
        """Write a file, which counts only once `commit` lists it; `digest` as in `create`.

        Raises RunHeld instead of replacing a successor's file.
        """
        for _ in range(_TRIES):
            if self.store.create(key, data, digest):
                return
            try:
                there, version = self.store.get_versioned(key)
            except FileNotFoundError:
                continue
            if there == data:
                return
            # Check after reading the version: a successor's later write would change it.
            self.require()
            if self.store.swap(key, data, version, digest):
                return
        raise ServiceUnreachable(
            f"{self.store.uri}/{key}: other processes keep writing it", service="store"
        )

    def commit(self, entry: Entry, files: Iterable[str], policy: CheckpointPolicy) -> None:
        """List a checkpoint whose files are all uploaded; delete those that the policy drops.

        Raises RunHeld.
        """
        index = self._change(lambda index: retained([*_without(index, entry.step), entry], policy))
        kept = {one.step for one in index.checkpoints}
        if self._files is None:
            self._files = _folders(self.store)
        self._files[entry.step] = [*files, STATE]
        self._sweep(self._files, lambda step: step < entry.step and step not in kept)

    def look_again(self) -> None:
        """Make the next commit list the folder: a checkpoint may have been left incomplete."""
        self._files = None

    def forget(self, after: int) -> None:
        """Delete incomplete checkpoints and all after a step, since the steps will be repeated."""
        index = self._change(lambda index: [one for one in index.checkpoints if one.step <= after])
        kept = {one.step for one in index.checkpoints}
        self._sweep(_folders(self.store), lambda step: step not in kept)
        self.look_again()

    def _change(self, entries: Callable[[Index], list[Entry]]) -> Index:
        for _ in range(_TRIES):
            known, self._known = self._known, None  # outdated if the swap below fails
            index, version = known or read_index(self.store)
            self._check(index)
            wanted = Index(index.owner, index.token, entries(index))
            if version and wanted == index and known is None:
                return wanted
            if written := self.store.swap(INDEX, wanted.encoded(), version):
                self._known = wanted, written
                return wanted
        raise ServiceUnreachable(
            f"{self.store.uri}/{INDEX}: other processes keep writing it", service="store"
        )

    def _sweep(self, there: dict[int, list[str]], gone: Callable[[int], bool]) -> None:
        for step in [step for step in there if gone(step)]:
            # Delete the state first: without it, no reader treats the rest as a checkpoint.
            names = sorted(there[step], key=lambda name: name != STATE)
            self.store.delete(*(f"{folder_name(step)}/{name}" for name in names))
            del there[step]


def _without(index: Index, step: int) -> list[Entry]:
    return [one for one in index.checkpoints if one.step != step]


def claim(store: ObjectStore, token: int | None) -> Fence:
    """Claim the right to add checkpoints, with a lease's token (None: without a lease).

    Raises RunHeld if the holder of a later lease has claimed it.
    """
    for _ in range(_TRIES):
        index, version = read_index(store)
        if token is not None and token < index.token:
            raise RunHeld(
                f"{store.uri}: its checkpoints belong to a later lease (token {index.token}; this "
                f"one's is {token}); if the ledger was recreated meanwhile, start a new run with "
                "--new",
                token=token,
                newest=index.token,
            )
        mine = Index(secrets.token_hex(8), max(token or 0, index.token), index.checkpoints)
        if store.swap(INDEX, mine.encoded(), version):
            return Fence(store, mine.owner)
    raise RunHeld(f"{store.uri}: several launches of this run start at the same time")
