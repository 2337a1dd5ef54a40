"""The content of a checkpoint, and how to read one: verified, falling back to the one before.

A checkpoint is checkpoints/step-00000120/ with model.safetensors, optimizer.safetensors and
state.json. The tensors of a large one are sharded, one shard per rank. state.json is written last
and holds size and SHA-256 of the other files. `fence` decides which checkpoints count. Nothing is
pickled.
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
from trainwright.tasks.spec.train_spec import CheckpointPolicy
from trainwright.tasks.storage.objects import Content, ObjectStore, get_verified, sha256
from trainwright.tasks.train.checkpoint.fence import STATE, Entry, Fence, folder_name, read_index
from trainwright.tasks.train.checkpoint.shards import merged

if TYPE_CHECKING:
    pass

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
FILE = re.compile(r"^(model|optimizer)(-\d{5}-of-\d{5})?\.safetensors$")
"""The pattern of names of tensor files."""
_log = logging.getLogger(__name__)


@dataclass
class CheckpointState:
    """The state of a training besides its tensors. `step` is the number of finished steps."""

    step: int
    epoch: int
    split: list[int]
    metrics: dict[str, float] = field(default_factory=dict)
    """validation metrics of the last finished epoch"""
    by_class: dict[str, Any] = field(default_factory=dict)
    """figures of that validation by class"""
    best: bool = False
    """whether this checkpoint's metrics were the best so far"""
    best_score: float | None = None
    best_loss: float | None = None
    """validation's loss in the best one: of equal scores, the lower loss is the best"""
    since_best: int = 0
    """the number of validations since the score last improved"""
    ended: bool = False
    """whether the training ends here, before its last epoch (`early_stopping`)"""
    events: list[dict[str, Any]] = field(default_factory=list)
    """all split events so far"""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """rows of finished epochs that may not be uploaded yet"""
    epoch_loss_sum: float = 0.0
    """Σ of the epoch's steps: loss times its weight"""
    epoch_weight: float = -1.0
    """of these losses; -1: not recorded, their samples"""
    epoch_samples: int = 0
    samples: int = -1
    """samples since the training began, which give the position in the epoch; -1: not recorded"""
    adaptive: dict[str, Any] = field(default_factory=dict)
    """the noise scale, and the state of the adaptive batch if the job uses it"""
    duration_s: float = 0.0
    """duration of the training so far"""
    members: list[int] | None = None
    """the ranks for which the split was made; None: all"""
    rate_factor: float = 1.0
    """the factor on the learning rate after divergences of the loss"""
    setbacks: int = 0
    """the number of divergences so far"""
    first_losses: list[float] = field(default_factory=list)
    """losses of the first steps, to which later losses are compared"""
    smoothed_loss: float = 0.0
    sha256: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each tensor file, by name"""
    size_bytes: dict[str, int] = field(default_factory=dict)
    """size of each tensor file, by name; absent in version 1"""
    layout: str = ""
    """the name of the layout in which the ranks were; empty: an earlier version"""
    summed: list[str] = field(default_factory=list)
    """layers that are summed, as the rows of all ranks did not fit into a device's memory"""
    owner: str = ""
    """the launch that wrote it (`fence`)"""
    token: int | None = None
    """the fencing token of that launch's lease"""
    schema_version: int = 2

    def __post_init__(self) -> None:
        if self.epoch_weight < 0:
            self.epoch_weight = float(self.epoch_samples)

    def encoded(self) -> bytes:
        """The bytes of state.json."""
        return json.dumps(vars(self), indent=1).encode()

    def add_file(self, name: str, data: Content) -> str:
        """Record size and SHA-256 of a tensor file; returns the SHA-256."""
        self.size_bytes[name], self.sha256[name] = len(data), sha256(data)
        return self.sha256[name]


def initial_batch(state: CheckpointState) -> int:
    """The initial global batch of the training."""
    return int(state.adaptive["growth"]["base"]) if "growth" in state.adaptive else sum(state.split)


def write_state(fence: Fence, state: CheckpointState, policy: CheckpointPolicy) -> None:
    """Complete a checkpoint whose tensor files are all in the store. Raises RunHeld."""
    data = state.encoded()
    digest = sha256(data)
    fence.put(f"{folder_name(state.step)}/{STATE}", data, digest)
    fence.commit(Entry(state.step, digest, state.best), state.sha256, policy)


def parsed(data: bytes) -> CheckpointState:
    """Parse a state.json; ignores fields of later versions. Raises CorruptArtefact."""
    try:
        document = json.loads(data)
        state = CheckpointState(
            **{
                name: document[name]
                for name in document
                if name in CheckpointState.__dataclass_fields__
            }
        )
        unknown = [name for name in state.sha256 if not FILE.match(name)]
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptArtefact(f"{STATE}: {error}") from error
    if unknown:
        raise CorruptArtefact(f"{STATE}: lists a file {unknown[0]!r}, which is not a tensor file")
    return state


def list_states(store: ObjectStore) -> list[CheckpointState]:
    """The states of the checkpoints, by step. Skips damaged ones, with a warning."""
    found = []
    for entry in read_index(store)[0].checkpoints:
        try:
            key = f"{folder_name(entry.step)}/{STATE}"
            found.append(parsed(get_verified(store, key, entry.sha256)))
        except CorruptArtefact as error:
            _log.warning("%s: skips the damaged step %d: %s", store.uri, entry.step, error)
    return found


def best_of(states: list[CheckpointState]) -> CheckpointState | None:
    """The newest checkpoint that was the best when it was written."""
    return next((state for state in reversed(states) if state.best), None)


def stored_of(states: list[CheckpointState], policy: CheckpointPolicy) -> CheckpointState | None:
    """The checkpoint whose model is stored: the best if the policy keeps it, else the last."""
    return (best_of(states) if policy.keep_best else None) or (states[-1] if states else None)


def fetch(store: ObjectStore, state: CheckpointState, name: str, into: Path) -> list[Path]:
    """Download the files of one kind (MODEL, OPTIMIZER), verified. Raises CorruptArtefact."""
    stem, folder = name.split(".")[0], folder_name(state.step)
    files = sorted(file for file in state.sha256 if re.split(r"[-.]", file)[0] == stem)
    if not files and name == MODEL:
        raise CorruptArtefact(f"{store.uri}/{folder}/{STATE}: lists no {name}")
    sizes = {item.key: item.size for item in store.list(f"{folder}/")}
    paths = []
    for file in files:
        key = f"{folder}/{file}"
        size = sizes.get(key, 0)
        if size != state.size_bytes.get(file, size):  # check before reading it into memory
            raise CorruptArtefact(
                f"{store.uri}/{key}: has {size} bytes; {state.size_bytes[file]} were written"
            )
        data = get_verified(store, key, state.sha256[file])
        into.mkdir(parents=True, exist_ok=True)
        paths.append(into / file)
        paths[-1].write_bytes(data)
    return paths


def whole_model(store: ObjectStore, state: CheckpointState) -> bytes:
    """The model of a checkpoint as one safetensors file. Raises CorruptArtefact."""
    with tempfile.TemporaryDirectory() as folder:
        files = [path.read_bytes() for path in fetch(store, state, MODEL, Path(folder))]
    try:
        return merged(files)
    except ValueError as error:
        raise CorruptArtefact(f"{store.uri}/{folder_name(state.step)}: {error}") from error


def fetch_latest(store: ObjectStore, into: Path) -> CheckpointState | None:
    """Download the newest intact checkpoint into a folder; None if there is none."""
    states = list_states(store)
    for place, state in reversed(list(enumerate(states))):
        try:
            for name in (MODEL, OPTIMIZER):
                fetch(store, state, name, into)
        except CorruptArtefact as error:
            instead = (
                "the checkpoint before it is used"
                if place
                else "there is none before it: training starts from step 0"
            )
            progress.emit("notice", message=f"{error}; {instead}")
            continue
        (into / STATE).write_bytes(state.encoded())
        return state
    return None
