"""Who may add checkpoints to a run: checkpoints.json names the launch that may, and lists what counts.

A checkpoint exists when the index lists it. The index is changed by compare-and-swap only, and each launch of a training puts its
own name (`owner`) there first, with its lease's fencing token. So what a launch does that slept through the end of its lease
changes nothing: its swaps fail, its files are not listed, and those of its successor it can't replace. What a checkpoint
holds: `checkpoint`. Runs from before there was an index have one made of the checkpoints they hold.
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
    """A checkpoint of the index: its state.json by SHA-256, and whether it was the best when it was written."""

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

    def encoded(self) -> bytes:
        """As it is stored."""
        return json.dumps(asdict(self), indent=1).encode()


def read_index(store: ObjectStore) -> tuple[Index, str | None]:
    """The index and the mark of its version; where there is none, one of every checkpoint that is there, and None."""
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
        return Index(
            str(found["owner"]), int(found["token"]), sorted(entries, key=lambda one: one.step)
        ), version
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
                best, token = False, newest  # whoever reads it says that it is damaged
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
    """Those that stay by the policy, by step: the last ones, the newest that was the best, every so many steps."""
    ordered = sorted(entries, key=lambda one: one.step)
    keep = {one.step for one in ordered[-policy.keep_last :]}
    if policy.keep_best:
        keep |= {one.step for one in [one for one in ordered if one.best][-1:]}
    if policy.keep_every is not None:
        keep |= {one.step for one in ordered if one.step % policy.keep_every == 0}
    return [one for one in ordered if one.step in keep]


class Fence:
    """The right of one launch to write below checkpoints/ and metrics/. It ends when another launch takes it."""

    def __init__(self, store: ObjectStore, owner: str) -> None:
        self.store, self.owner = store, owner
        self._known: tuple[Index, str] | None = None
        """the index and the mark of its version, as this launch wrote it last: as long as nobody else writes it"""
        self._there: dict[int, list[str]] = {}
        """the files of each checkpoint in the store, so that not every commit has to list them"""
        self._unsure = True

    def require(self) -> Index:
        """The index as it is now. Raises RunHeld where it is another's."""
        index, _ = read_index(self.store)
        self._check(index)
        return index

    def _check(self, index: Index) -> None:
        if index.owner != self.owner:
            raise RunHeld(
                f"{self.store.uri}: another launch of this training has taken over (lease token {index.token}); what this "
                "one did since does not count"
            )

    def put(self, key: str, data: Content, digest: str | None = None) -> None:
        """Write a file that counts for nothing until it is listed. Raises RunHeld rather than replace a successor's.

        `digest` as in `ObjectStore.create`.
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
            self.require()  # after the version was read: what a successor writes from now on has another
            if self.store.swap(key, data, version, digest):
                return
        raise ServiceUnreachable(
            f"{self.store.uri}/{key}: is being written by others", service="store"
        )

    def commit(self, entry: Entry, files: Iterable[str], policy: CheckpointPolicy) -> None:
        """List a checkpoint whose files are all there, and drop those that the policy no longer keeps. Raises RunHeld."""
        index = self._change(lambda index: retained([*_without(index, entry.step), entry], policy))
        kept = {one.step for one in index.checkpoints}
        self._there[entry.step] = [*files, STATE]
        if self._unsure:
            self._unsure = False
            self._there = _folders(self.store)
        self._sweep(self._there, lambda step: step < entry.step and step not in kept)

    def look_again(self) -> None:
        """A checkpoint was given up, or others may have left files (any thread may know): the next commit lists them."""
        self._unsure = True

    def forget(self, after: int) -> None:
        """Drop the checkpoints after a step, and the files of those that never were whole: that work is done again."""
        index = self._change(lambda index: [one for one in index.checkpoints if one.step <= after])
        kept = {one.step for one in index.checkpoints}
        self._sweep(_folders(self.store), lambda step: step not in kept)

    def _change(self, entries: Callable[[Index], list[Entry]]) -> Index:
        for _ in range(_TRIES):
            known, self._known = (
                self._known,
                None,
            )  # of use once: where the swap fails, it is out of date
            index, version = known or read_index(self.store)
            self._check(index)
            wanted = Index(index.owner, index.token, entries(index))
            if version and wanted == index and known is None:
                return wanted
            if written := self.store.swap(INDEX, wanted.encoded(), version):
                self._known = wanted, written
                return wanted
        raise ServiceUnreachable(f"{self.store.uri}/{INDEX}: can't be written", service="store")

    def _sweep(self, there: dict[int, list[str]], gone: Callable[[int], bool]) -> None:
        for step in [step for step in there if gone(step)]:
            # The state first: half a checkpoint is none.
            names = sorted(there[step], key=lambda name: name != STATE)
            self.store.delete(*(f"{folder_name(step)}/{name}" for name in names))
            del there[step]


def _without(index: Index, step: int) -> list[Entry]:
    return [one for one in index.checkpoints if one.step != step]


def claim(store: ObjectStore, token: int | None) -> Fence:
    """Take the right to add checkpoints, in the name of a lease's token (None: without a lease).

    Raises RunHeld where a later lease's holder was there already.
    """
    for _ in range(_TRIES):
        index, version = read_index(store)
        if token is not None and token < index.token:
            raise RunHeld(
                f"{store.uri}: its checkpoints belong to a later lease (token {index.token}; this one's is {token}); if the "
                "ledger was made anew meanwhile, start a new run with --new",
                token=token,
                newest=index.token,
            )
        mine = Index(secrets.token_hex(8), max(token or 0, index.token), index.checkpoints)
        if store.swap(INDEX, mine.encoded(), version):
            return Fence(store, mine.owner)
    raise RunHeld(f"{store.uri}: others start to train this run at the same time")
