"""Which checkpoints count, and which launch may add to them: checkpoints.json, the index.

A checkpoint exists if the index lists it. The index is only changed by compare-and-swap, and each
launch of a training first puts its own name (`owner`) there, with the fencing token of its lease.
So a launch that slept through the end of its lease changes nothing: its swaps fail, its files are
not listed, and it can't replace those of its successor. Runs without an index get one of the
checkpoints that they hold.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from trainwright.tasks.errors import RunHeld, ServiceUnreachable
from trainwright.tasks.spec.job import CheckpointPolicy
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
    """A checkpoint of the index: its state.json by SHA-256; `best` if it was when it was taken."""

    step: int
    sha256: str
    best: bool = False


@dataclass(frozen=True)
class Index:
    """The checkpoints that count, by step, and the launch that may add to them."""

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
    """The index and the mark of its version; without an index, one of all checkpoints, and None."""
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
        _log.warning("%s/%s is damaged; every checkpoint there counts: %r", store.uri, INDEX, error)
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
                best, token = False, newest  # whoever reads it reports the damage
            if token < newest:
                continue  # of a launch that another had taken over from at an earlier step
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
    """Those that the policy keeps, by step: the last ones, the newest best, every so many steps."""
    ordered = sorted(entries, key=lambda one: one.step)
    keep = {one.step for one in ordered[-policy.keep_last :]}
    if policy.keep_best:
        keep |= {one.step for one in [one for one in ordered if one.best][-1:]}
    if policy.keep_every is not None:
        keep |= {one.step for one in ordered if one.step % policy.keep_every == 0}
    return [one for one in ordered if one.step in keep]


class Fence:
    """The right of one launch to add checkpoints. It ends when another launch takes it."""

    def __init__(self, store: ObjectStore, owner: str) -> None:
        self.store, self.owner = store, owner
        self._known: tuple[Index, str] | None = None
        """the index and its version as this launch wrote it last: true until another writes it"""
        self._files: dict[int, list[str]] | None = None
        """the files of each checkpoint in the store; None: list them at the next commit"""

    def require(self) -> Index:
        """The index as it is now. Raises RunHeld if it is another launch's."""
        index, _ = read_index(self.store)
        self._check(index)
        return index

    def _check(self, index: Index) -> None:
        if index.owner != self.owner:
            raise RunHeld(
                f"{self.store.uri}: another launch of this training has taken over (lease token "
                f"{index.token}); what this one did since does not count"
            )

    def put(self, key: str, data: Content, digest: str | None = None) -> None:
        """Write a file, which does not count until it is listed; `digest` as in `create`.

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
            # After the version was read: whatever a successor writes from now on has another.
            self.require()
            if self.store.swap(key, data, version, digest):
                return
        raise ServiceUnreachable(
            f"{self.store.uri}/{key}: other processes keep writing it", service="store"
        )

    def commit(self, entry: Entry, files: Iterable[str], policy: CheckpointPolicy) -> None:
        """List a checkpoint whose files are all there; delete those that the policy drops.

        Raises RunHeld.
        """
        index = self._change(lambda index: retained([*_without(index, entry.step), entry], policy))
        kept = {one.step for one in index.checkpoints}
        if self._files is None:
            self._files = _folders(self.store)
        self._files[entry.step] = [*files, STATE]
        self._sweep(self._files, lambda step: step < entry.step and step not in kept)

    def look_again(self) -> None:
        """A checkpoint may have been left incomplete: the next commit lists what is there."""
        self._files = None

    def forget(self, after: int) -> None:
        """Delete all checkpoints after a step and all incomplete ones: that work is done again."""
        index = self._change(lambda index: [one for one in index.checkpoints if one.step <= after])
        kept = {one.step for one in index.checkpoints}
        self._sweep(_folders(self.store), lambda step: step not in kept)
        self.look_again()

    def _change(self, entries: Callable[[Index], list[Entry]]) -> Index:
        for _ in range(_TRIES):
            known, self._known = self._known, None  # if the swap fails, it is out of date
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
            # The state first: without it, no reader takes the rest for a checkpoint.
            names = sorted(there[step], key=lambda name: name != STATE)
            self.store.delete(*(f"{folder_name(step)}/{name}" for name in names))
            del there[step]


def _without(index: Index, step: int) -> list[Entry]:
    return [one for one in index.checkpoints if one.step != step]


def claim(store: ObjectStore, token: int | None) -> Fence:
    """Take the right to add checkpoints in the name of a lease's token (None: without a lease).

    Raises RunHeld if the holder of a later lease has taken it before.
    """
    for _ in range(_TRIES):
        index, version = read_index(store)
        if token is not None and token < index.token:
            raise RunHeld(
                f"{store.uri}: its checkpoints belong to a later lease (token {index.token}; this "
                f"one's is {token}); if the ledger was made anew meanwhile, start a new run with "
                "--new",
                token=token,
                newest=index.token,
            )
        mine = Index(secrets.token_hex(8), max(token or 0, index.token), index.checkpoints)
        if store.swap(INDEX, mine.encoded(), version):
            return Fence(store, mine.owner)
    raise RunHeld(f"{store.uri}: several launches of this run start at the same time")
