"""Step `store`: stores the model in the run folder and seals the run; loads a verified model.

The manifest holds the size and SHA-256 of every file. A conditional write creates it once, last, so
a run that has one is complete. Sealing reads each file back once, and compares it with the digest
from the time of writing if there is one.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainwright.estimator.trace import source as model_source
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.errors import BadInput, CorruptArtefact
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.run_status import Manifest, SealedFile
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run, now
from trainwright.tasks.runs.sealed_objects import NOT_SEALED, SEALED_APART
from trainwright.tasks.settings import Settings
from trainwright.tasks.storage.objects import ObjectStore, sha256
from trainwright.tasks.train.checkpoint import files as checkpoint
from trainwright.tasks.train.checkpoint.fence import folder_name
from trainwright.tasks.units import size

if TYPE_CHECKING:
    import torch

_SIGNATURE, _WEIGHTS, _SOURCE = "model/signature.json", "model/model.safetensors", "model/source/"


def work(context: RunContext) -> Reference:
    """Store the model, add the run's measurements to the calibration sets, and seal the run.

    Verifies a run that is already sealed.
    """
    from trainwright.tasks.estimate import finished_runs

    run = context.run
    if run.finished():
        manifest = verify(run)
    else:
        written = save_model(run)
        finished_runs.append(run)  # before the seal, so every sealed run is included
        manifest = seal(run, written)
    return {
        "artefact": manifest.FILE,
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files.values()),
        "verified": True,
    }


def summary(reference: Reference) -> str:
    """One line, as in `25 files, 412 KiB, sealed and verified`."""
    return f"{reference['files']} files, {size(reference['bytes'])}, sealed and verified"


def save_model(run: Run) -> dict[str, str]:
    """Write the trained model to model/: weights, source and signature.

    The weights are the best checkpoint's, else the last one's. Returns the SHA-256 of each file of
    the model and of the checkpoints, computed when the file was written.
    """
    result, plan, job = run.read(Result), run.read(Plan), run.job()
    states = checkpoint.list_states(run.objects)
    chosen = checkpoint.stored_of(states, job.train.checkpoint)
    if chosen is None:
        raise CorruptArtefact(f"{run.uri}/checkpoints: no complete checkpoint")
    weights = checkpoint.whole_model(run.objects, chosen)
    model = run.model()
    validation = run.read(Validation)
    search = run.find(LearningRateSearch)
    assert validation.data is not None  # a run with rejected data has no result
    data = validation.data
    signature = {
        "schema_version": 1,
        "entry": model.entry,
        "config": dict(model.config),
        "source_sha256": model.sha256,
        "weights_sha256": sha256(weights),
        "checkpoint_step": chosen.step,
        "metrics": chosen.metrics,
        "task": data.task,
        "inputs": {
            name: {"shape": shape, "dtype": data.input_dtypes[name]}
            for name, shape in data.inputs.items()
        },
        "target": {"name": data.target, "dtype": data.target_dtype, "classes": data.classes},
        "precision": job.train.precision,
        "trained_with": {
            "global_batch_size": plan.global_batch_size,
            "learning_rate": search.learning_rate if search else None,
            "versions": result.versions,
        },
        "how_to_load": (
            "trainwright.tasks.store.load_model(run_uri): verifies, imports the source, loads the "
            "safetensors"
        ),
    }
    contents = {f"{_SOURCE}{name}": content for name, content in model.files.items()}
    contents[_WEIGHTS] = weights
    contents[_SIGNATURE] = json.dumps(signature, indent=1).encode()
    for key, content in contents.items():
        run.objects.put(key, content)
    written = {key: sha256(content) for key, content in contents.items()}
    for state in states:
        folder = folder_name(state.step)
        written |= {f"{folder}/{name}": digest for name, digest in state.sha256.items()}
    return written


def seal(run: Run, written: Mapping[str, str] = MappingProxyType({})) -> Manifest:
    """Write the manifest of all files in the run folder except status, report and exports.

    `written`: the digests by key that the files must have when read back. Raises CorruptArtefact
    if a file differs from what was written, or the run is already sealed with other content.
    """
    manifest = Manifest(run=run.uri, sealed_at=now(), files=_files(run.objects.stored))
    for key, digest in written.items():
        if key not in manifest.files or manifest.files[key].sha256 != digest:
            raise CorruptArtefact(f"{run.uri}/{key}: missing, or changed after it was written")
    if not run.objects.create(Manifest.FILE, manifest.model_dump_json(indent=1).encode()):
        sealed = run.read(Manifest)
        if sealed.files != manifest.files:
            differences = _differences(sealed.files, manifest.files)
            raise CorruptArtefact(f"{run.uri}: is already sealed with other content: {differences}")
        return sealed
    return manifest


def verify(run: Run) -> Manifest:
    """Read all files back and compare them with the manifest.

    Raises CorruptArtefact naming missing, changed and extra files.
    """
    try:
        manifest = run.read(Manifest)
    except FileNotFoundError:
        raise CorruptArtefact(f"{run.uri}: has no manifest.json; the run is not finished") from None
    found = _files(run.objects.stored)
    if found != manifest.files:
        raise CorruptArtefact(
            f"{run.uri}: differs from what was sealed: {_differences(manifest.files, found)}"
        )
    return manifest


def _files(objects: ObjectStore) -> dict[str, SealedFile]:
    return {
        item.key: SealedFile(size=size, sha256=digest)
        for item in objects.list()
        if item.key not in NOT_SEALED and not item.key.startswith(SEALED_APART)
        for size, digest in [_measured(objects, item.key)]
    }


def _measured(objects: ObjectStore, key: str) -> tuple[int, str]:
    """Size and SHA-256 of an object. Reads it through a file, so a large one needs no memory."""
    with tempfile.TemporaryDirectory(prefix="trainwright-verify-") as folder:
        path = Path(folder) / "object"
        objects.get_file(key, path)
        with path.open("rb") as file:
            return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _differences(sealed: dict[str, SealedFile], found: dict[str, SealedFile]) -> str:
    missing = sorted(sealed.keys() - found.keys())
    extra = sorted(found.keys() - sealed.keys())
    changed = sorted(key for key in sealed.keys() & found.keys() if sealed[key] != found[key])
    parts = [
        f"{word} {', '.join(keys[:5])}"
        for word, keys in (("missing", missing), ("changed", changed), ("extra", extra))
        if keys
    ]
    return "; ".join(parts)


def seal_folder(run: Run, folder: str) -> None:
    """Seal a folder of the run separately (report/, export/<kind>/), whenever it is made."""
    objects = run.objects.stored
    files = {
        item.key: list(_measured(objects, item.key))
        for item in objects.list(folder)
        if item.key != f"{folder}{Manifest.FILE}"
    }
    document: dict[str, Any] = {
        "schema_version": 1,
        "sealed_at": now(),
        "files": {
            key.removeprefix(folder): {"size": size, "sha256": digest}
            for key, (size, digest) in files.items()
        },
    }
    objects.put(f"{folder}{Manifest.FILE}", json.dumps(document, indent=1).encode())


def unpack_model(run: Run, files: Mapping[str, SealedFile], folder: Path) -> dict[str, Any]:
    """Put the source of a sealed run's model into a folder. Returns the model's signature.

    `files` are the manifest's. Raises BadInput if there is no model, CorruptArtefact for a file
    that differs from what was sealed.
    """
    if _SIGNATURE not in files:
        raise BadInput(f"{run.uri}: has no model")
    signature: dict[str, Any] = json.loads(run.objects.get(_SIGNATURE))
    for key in files:
        if key.startswith(_SOURCE):
            path = folder / key.removeprefix(_SOURCE)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(run.objects.get(key))
    return signature


def model_weights(run: Run) -> bytes:
    """The weights of a sealed run's model. Raises CorruptArtefact if they were changed."""
    return run.objects.get(_WEIGHTS)


def load_model(run_uri: str, folder: Path, settings: Settings | None = None) -> torch.nn.Module:
    """Load the verified model of a finished run; puts its source in `folder` and imports it.

    Never uses pickle.
    """
    from safetensors.torch import load

    from trainwright.estimator.precision import cast

    run = Run(run_uri, settings or Settings.from_environment())
    signature = unpack_model(run, verify(run).files, folder)
    model = cast(
        model_source.build(model_source.load(folder, signature["entry"]), signature["config"]),
        signature["precision"],
    )
    model.load_state_dict(load(model_weights(run)))
    return model.eval()
