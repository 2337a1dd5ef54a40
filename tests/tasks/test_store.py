"""Step `store` stores the model and seals the run, and verification detects later changes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import doors
import pytest
import torch
from finished_run import begin_run, finished_training, local_path, write_checkpoints, write_outcome

from trainwright.infra.s3_server import S3Access
from trainwright.tasks.analyze.history import analyze
from trainwright.tasks.context import RunContext
from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.artefacts.run_status import Manifest, Status
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.listing import row_of
from trainwright.tasks.runs.run import Run, replayed
from trainwright.tasks.runs.sealed_objects import SealedObjects
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.store import load_model, save_model, seal, seal_folder, verify, work
from trainwright.tasks.summary import summary


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
def sealed(store: str) -> Run:
    run = finished_training(store)
    save_model(run)
    seal(run)
    return run


def test_the_stored_model_is_the_best_checkpoints(store: str) -> None:
    run = begin_run(store, "small", 1)
    weights = write_checkpoints(run, (True, True, False))
    write_outcome(run, metrics={"accuracy": 0.95})
    save_model(run)
    assert json.loads(run.objects.get("model/signature.json"))["checkpoint_step"] == 20
    from safetensors.torch import load

    kept = load(run.objects.get("model/model.safetensors"))
    assert all(torch.equal(kept[name], value) for name, value in weights[1].items())


def test_without_keep_best_the_stored_model_is_the_last_checkpoints(store: str) -> None:
    run = finished_training(store, checkpoint={"keep_best": False})
    save_model(run)
    assert json.loads(run.objects.get("model/signature.json"))["checkpoint_step"] == 30


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "amp"])
def test_a_loaded_model_gives_the_trained_models_outputs(
    store: str, tmp_path: Path, precision: str
) -> None:
    run = begin_run(store, "small", 1, precision=precision)
    weights = write_checkpoints(run, (False, True))[1]
    write_outcome(run, metrics={"accuracy": 0.95})
    save_model(run)
    seal(run)
    model = load_model(run.uri, tmp_path / "code")
    inputs = torch.rand(5, 4, dtype=weights["weight"].dtype)
    assert torch.equal(model(inputs), torch.nn.functional.linear(inputs, **weights))
    assert not model.training
    assert (tmp_path / "code" / "m.py").read_bytes() == run.objects.get("source/m.py")


def test_the_signature_describes_the_inputs_and_the_training(store: str) -> None:
    run = finished_training(store)
    save_model(run)
    signature = json.loads(run.objects.get("model/signature.json"))
    assert signature["inputs"] == {"inputs": {"shape": [4], "dtype": "float32"}}
    assert signature["target"]["classes"] == ["a", "b", "c"]
    assert signature["config"] == {"width": 4}
    assert (
        signature["weights_sha256"]
        == hashlib.sha256(run.objects.get("model/model.safetensors")).hexdigest()
    )


def test_a_run_without_a_complete_checkpoint_has_no_model(store: str) -> None:
    run = begin_run(store, "small", 1)
    write_outcome(run, metrics={"accuracy": 0.95})
    with pytest.raises(CorruptArtefact, match="no complete checkpoint"):
        save_model(run)


def test_a_damaged_checkpoint_is_not_used_as_the_model(store: str) -> None:
    run = finished_training(store)
    model = local_path(run, "checkpoints/step-00000020/model.safetensors")
    size = model.stat().st_size
    model.write_bytes(bytes(size))
    with pytest.raises(CorruptArtefact, match=r"step-00000020/model\.safetensors: changed"):
        save_model(run)
    model.write_bytes(bytes(size + 1))
    with pytest.raises(CorruptArtefact, match=rf"has {size + 1} bytes; {size} were written"):
        save_model(run)


def test_the_manifest_contains_size_and_sha256_of_every_file_except_separately_sealed_folders(
    sealed: Run,
) -> None:
    sealed.objects.put("report/report.html", b"later")
    sealed.objects.put("export/onnx/model.onnx", b"later")
    manifest = verify(sealed)
    root = local_path(sealed, "")
    expected = {
        path.relative_to(root).as_posix(): (
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in root.rglob("*")
        if path.is_file()
        and path.relative_to(root).parts[0]
        not in ("report", "export", "status.json", "manifest.json")
    }
    assert {key: (file.size, file.sha256) for key, file in manifest.files.items()} == expected
    assert {
        "job.json",
        "result.json",
        "model/model.safetensors",
        "source/m.py",
        "logs/rank-0.log",
    } <= expected.keys()


def test_a_sealed_run_stays_valid_when_its_status_and_report_change(sealed: Run) -> None:
    sealed.write(Status(state="success", holder="you", started_at="1", updated_at="2"))
    sealed.objects.put("report/report.html", b"<html>")
    assert verify(sealed) == sealed.read(Manifest)


def test_sealing_the_same_content_again_changes_nothing(sealed: Run) -> None:
    before = sealed.objects.get("manifest.json")
    assert seal(sealed) == sealed.read(Manifest)
    assert sealed.objects.get("manifest.json") == before


def test_sealing_again_with_other_content_is_refused_and_names_the_file(sealed: Run) -> None:
    before = sealed.objects.get("manifest.json")
    sealed.objects.put("result.json", b"{}")
    with pytest.raises(
        CorruptArtefact, match=r"already sealed with other content: changed result\.json"
    ):
        seal(sealed)
    assert sealed.objects.get("manifest.json") == before


def test_concurrent_seals_get_the_same_manifest(store: str) -> None:
    run = finished_training(store)
    with ThreadPoolExecutor(8) as pool:
        manifests = list(pool.map(lambda _: seal(doors.run_at(run.uri)), range(8)))
    assert set(map(Manifest.model_dump_json, manifests)) == {run.read(Manifest).model_dump_json()}


class Counting(FolderStore):
    """A folder that records which objects are read back."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_back = Counter[str]()

    def get_file(self, key: str, path: Path) -> None:
        self.read_back[key] += 1
        super().get_file(key, path)


def test_sealing_reads_every_object_back_once(store: str, home: Path) -> None:
    run = finished_training(store)
    objects = Counting(local_path(run, ""))
    run.objects = SealedObjects(objects)
    reference = work(RunContext(run, Holder("me")))
    manifest = run.read(Manifest)
    assert reference["files"] == len(manifest.files)
    assert objects.read_back == dict.fromkeys(manifest.files, 1)
    assert verify(run) == manifest
    assert work(RunContext(run, Holder("me"))) == reference  # and a sealed run is verified


@pytest.mark.parametrize(
    "key",
    ["model/source/m.py", "model/signature.json", "checkpoints/step-00000010/model.safetensors"],
)
@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_file_changed_after_writing_is_not_sealed(store: str, key: str, damage: str) -> None:
    run = finished_training(store)
    written = save_model(run)
    if damage == "changed":
        _flip(local_path(run, key))
    else:
        local_path(run, key).unlink()
    with pytest.raises(CorruptArtefact, match=f"{key}: missing, or changed after it was written"):
        seal(run, written)
    assert not run.finished()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, r"missing model/model\.safetensors"),
        (_flip, r"changed model/model\.safetensors"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            r"changed model/model\.safetensors",
        ),
        (lambda path: path.write_bytes(b""), r"changed model/model\.safetensors"),
        (lambda path: path.with_name("other").write_bytes(b"x"), "extra model/other"),
    ],
    ids=["deleted", "one bit flipped", "cut short", "emptied", "another file beside it"],
)
def test_a_changed_run_is_refused_and_the_file_is_named(
    sealed: Run, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(local_path(sealed, "model/model.safetensors"))
    with pytest.raises(CorruptArtefact, match=said):
        verify(sealed)
    with pytest.raises(CorruptArtefact, match=said):
        load_model(sealed.uri, tmp_path / "code")


READERS: dict[str, Callable[[Run], object]] = {
    "show": summary,
    "analyze": analyze,
    "replay": lambda run: replayed(run.uri, run.job(), run.settings),
    "open": lambda run: run.find(Result),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_whoever_reads_a_changed_file_of_a_sealed_run_is_told(
    sealed: Run, reader: str, damage: str
) -> None:
    file = local_path(sealed, "result.json")
    if damage == "changed":
        file.write_text(file.read_text().replace("0.9", "0.8"))
    else:
        file.unlink()
    with pytest.raises(CorruptArtefact, match=rf"result\.json: {damage}.*; restore the file"):
        READERS[reader](doors.run_at(sealed.uri))
    row = row_of(doors.run_at(sealed.uri))
    assert row is not None
    assert row.state == "damaged"


def test_a_file_added_to_a_sealed_run_is_not_read(sealed: Run) -> None:
    sealed.objects.put("recommendation.json", b"{}")
    with pytest.raises(CorruptArtefact, match="is not among the files that were sealed"):
        summary(sealed)


def test_a_report_changed_after_it_was_sealed_is_not_shown(sealed: Run) -> None:
    sealed.objects.put("report/report.html", b"as written")
    seal_folder(sealed, "report/")
    assert sealed.objects.get("report/report.html") == b"as written"
    sealed.objects.put("report/report.html", b"changed")
    with pytest.raises(CorruptArtefact, match=r"report\.html: changed .*`trainwright analyze`"):
        sealed.objects.get("report/report.html")


def test_changed_source_is_never_run(sealed: Run, tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    local_path(sealed, "model/source/m.py").write_text(f"open({str(mark)!r}, 'w')\n")
    with pytest.raises(CorruptArtefact, match=r"changed model/source/m\.py"):
        load_model(sealed.uri, tmp_path / "code")
    assert not mark.exists()


def test_a_run_without_a_manifest_is_not_finished(store: str) -> None:
    with pytest.raises(CorruptArtefact, match="not finished"):
        verify(finished_training(store))


def test_a_damaged_manifest_is_named(sealed: Run) -> None:
    local_path(sealed, "manifest.json").write_bytes(b'{"run": ')
    with pytest.raises(CorruptArtefact, match=r"manifest\.json"):
        verify(sealed)


def test_a_separately_sealed_folder_lists_its_files_by_relative_name(store: str) -> None:
    run = finished_training(store)
    for content in (b"first", b"second"):
        run.objects.put("report/report.html", content)
        seal_folder(run, "report/")
        files = json.loads(run.objects.get("report/manifest.json"))["files"]
        assert files == {
            "report.html": {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        }


def test_a_sealed_run_on_an_s3_server_can_be_verified(s3: S3Access, tmp_path: Path) -> None:
    run = finished_training("s3://test-store-step/somewhere")
    save_model(run)
    manifest = seal(run)
    assert seal(run) == verify(run) == manifest
    assert isinstance(load_model(run.uri, tmp_path / "code"), torch.nn.Linear)
    run.objects.put("metrics/splits-00000000.parquet", b"")
    with pytest.raises(CorruptArtefact, match=r"extra metrics/splits-00000000\.parquet"):
        verify(run)


@pytest.mark.parametrize("name", ["manifest.json.old", "status.json2"])
def test_a_file_named_almost_like_an_unsealed_one_is_an_extra_file(store: str, name: str) -> None:
    run = finished_training(store)
    save_model(run)
    seal(run)
    run.objects.put(name, b"x")
    with pytest.raises(CorruptArtefact, match=f"extra {name}"):
        verify(run)
