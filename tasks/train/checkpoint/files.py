"""What a checkpoint holds, and how one is read: verified, or passed over for the one before.

checkpoints/step-00000120/model.safetensors, optimizer.safetensors and state.json; the tensors of a
large one lie in shards, one a rank. state.json is written last and holds size and SHA-256 of the
other files. `fence` lists the checkpoints that count. Nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.tasks import progress
from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.spec.job import CheckpointPolicy
from trainwright.tasks.storage.objects import Content, ObjectStore, get_verified, sha256
from trainwright.tasks.train.checkpoint.fence import STATE, Entry, Fence, folder_name, read_index
from trainwright.tasks.train.checkpoint.shards import merged

if TYPE_CHECKING:
    import torch

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
FILE = re.compile(r"^(model|optimizer)(-\d{5}-of-\d{5})?\.safetensors$")
"""The name of a file of tensors."""
_log = logging.getLogger(__name__)


@dataclass
class State:
    """What the training goes on from besides tensors. `step` is the number of finished steps."""

    step: int
    epoch: int
    split: list[int]
    metrics: dict[str, float] = field(default_factory=dict)
    """of the last finished epoch"""
    best: bool = False
    """whether this checkpoint's metrics are the best so far"""
    best_score: float | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    """all changes of the split so far"""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """rows of finished epochs that the store may lack"""
    epoch_loss_sum: float = 0.0
    epoch_samples: int = 0
    samples: int = -1
    """taken since the training began: with the rows, its place in the epoch; -1: not recorded"""
    adaptive: dict[str, Any] = field(default_factory=dict)
    """the noise scale, and the batch's growth if the job lets it grow"""
    duration_s: float = 0.0
    """of the whole training until here"""
    members: list[int] | None = None
    """the ranks that the split is for; None: all"""
    rate_factor: float = 1.0
    """what is left of the learning rate after the loss ran away"""
    setbacks: int = 0
    """how often it did"""
    first_losses: list[float] = field(default_factory=list)
    """of the first steps: what later losses are compared to"""
    smoothed_loss: float = 0.0
    sha256: dict[str, str] = field(default_factory=dict)
    """of each file of tensors, by its name"""
    size_bytes: dict[str, int] = field(default_factory=dict)
    """of each file of tensors; absent in version 1"""
    owner: str = ""
    """the launch that wrote it (`fence`)"""
    token: int | None = None
    """the fencing token of that launch's lease"""
    schema_version: int = 2

    def encoded(self) -> bytes:
        """The bytes of state.json."""
        return json.dumps(vars(self), indent=1).encode()

    def add_file(self, name: str, data: Content) -> str:
        """Note size and SHA-256 of a file of tensors; the latter."""
        self.size_bytes[name], self.sha256[name] = len(data), sha256(data)
        return self.sha256[name]


def initial_batch(state: State) -> int:
    """The global batch that the training began with."""
    return int(state.adaptive["growth"]["base"]) if "growth" in state.adaptive else sum(state.split)


def write_state(fence: Fence, state: State, policy: CheckpointPolicy) -> None:
    """Make a checkpoint of files that are all in the store. Raises RunHeld."""
    data = state.encoded()
    digest = sha256(data)
    fence.put(f"{folder_name(state.step)}/{STATE}", data, digest)
    fence.commit(Entry(state.step, digest, state.best), state.sha256, policy)


def parsed(data: bytes) -> State:
    """The state in these bytes, without fields of a later version. Raises CorruptArtefact."""
    try:
        document = json.loads(data)
        state = State(
            **{name: document[name] for name in document if name in State.__dataclass_fields__}
        )
        strange = [name for name in state.sha256 if not FILE.match(name)]
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptArtefact(f"{STATE}: {error}") from error
    if strange:
        raise CorruptArtefact(f"{STATE}: names a file {strange[0]!r}")
    return state


def list_states(store: ObjectStore) -> list[State]:
    """The states of the checkpoints, by step. A damaged one is passed over, with a warning."""
    found = []
    for entry in read_index(store)[0].checkpoints:
        try:
            key = f"{folder_name(entry.step)}/{STATE}"
            found.append(parsed(get_verified(store, key, entry.sha256)))
        except CorruptArtefact as error:
            _log.warning("%s: step %d is damaged, passed over: %s", store.uri, entry.step, error)
    return found


def best_of(states: list[State]) -> State | None:
    """The newest of those that were the best when they were written."""
    return next((state for state in reversed(states) if state.best), None)


def fetch(store: ObjectStore, state: State, name: str, into: Path) -> list[Path]:
    """Download the files of one kind (MODEL, OPTIMIZER), verified. Raises CorruptArtefact."""
    stem, folder = name.split(".")[0], folder_name(state.step)
    files = sorted(file for file in state.sha256 if re.split(r"[-.]", file)[0] == stem)
    if not files and name == MODEL:
        raise CorruptArtefact(f"{store.uri}/{folder}/{STATE}: names no {name}")
    sizes = {item.key: item.size for item in store.list(f"{folder}/")}
    paths = []
    for file in files:
        key = f"{folder}/{file}"
        size = sizes.get(key, 0)
        if size != state.size_bytes.get(file, size):  # before it is read into memory
            raise CorruptArtefact(
                f"{store.uri}/{key}: has {size} bytes; {state.size_bytes[file]} were written"
            )
        data = get_verified(store, key, state.sha256[file])
        into.mkdir(parents=True, exist_ok=True)
        paths.append(into / file)
        paths[-1].write_bytes(data)
    return paths


def whole_model(store: ObjectStore, state: State) -> bytes:
    """The model of a checkpoint as one safetensors file. Raises CorruptArtefact."""
    with tempfile.TemporaryDirectory() as folder:
        files = [path.read_bytes() for path in fetch(store, state, MODEL, Path(folder))]
    try:
        return merged(files)
    except ValueError as error:
        raise CorruptArtefact(f"{store.uri}/{folder_name(state.step)}: {error}") from error


def fetch_latest(store: ObjectStore, into: Path) -> State | None:
    """Download the newest checkpoint that is whole into a folder; None if there is none."""
    states = list_states(store)
    for place, state in reversed(list(enumerate(states))):
        try:
            for name in (MODEL, OPTIMIZER):
                fetch(store, state, name, into)
        except CorruptArtefact as error:
            instead = (
                "the checkpoint before is used"
                if place
                else "there is none before it: training begins anew"
            )
            progress.emit("notice", message=f"{error}; {instead}")
            continue
        (into / STATE).write_bytes(state.encoded())
        return state
    return None


def read_local(folder: Path) -> tuple[State, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """State, model and optimizer of a checkpoint in a folder, its shards put together."""
    from safetensors.torch import load_file

    state = parsed((folder / STATE).read_bytes())
    model: dict[str, torch.Tensor] = {}
    optimizer: dict[str, torch.Tensor] = {}
    for file in sorted(state.sha256):
        part = load_file(folder / file)
        whole = model if file.startswith("model") else optimizer
        if twice := whole.keys() & part.keys():
            raise CorruptArtefact(f"{folder / file}: holds {min(twice)!r}, as another shard does")
        whole.update(part)
    return state, model, optimizer
