"""The step `extract`: a model's source gives its structure, or one clear line. Real processes.

`tests/e2e/test_hostile_models.py` tests hostile code.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doors
import psutil
import pytest

from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import BatchSpec
from trainwright.infra.sandbox import SandboxLimits
from trainwright.infra.sandbox.client import call
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput
from trainwright.tasks.extract import extract, extract_model, tracer
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.train_spec import Optimizer

IMAGES = BatchSpec(
    inputs={"inputs": (1, 8, 8)},
    input_dtypes={"inputs": "float32"},
    target_dtype="int64",
    classes=10,
    task="image-classification",
)
LIMITS = Settings().extract_limits()
OPTIONS: dict[str, Any] = {"batch_spec": IMAGES, "limits": LIMITS}
MEMORY = 8 * 2**30
HEAD = "import torch\nfrom torch import nn\n"
GOOD = """
def build_model(width=16, classes=10):
    head = nn.Linear(36 * width, classes)
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(), nn.Flatten(), head)
"""
EXAMPLE = """
def example_batch(size):
    return torch.rand(size, 1, 8, 8), torch.randint(0, 10, (size,))
"""


@pytest.fixture(scope="module", autouse=True)
def _one_server() -> Iterator[None]:
    """One sandbox server traces the models of all tests: it imports torch once."""
    with tracer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIONS, "server", server)
        yield


def _extract(
    folder: Path, code: str, config: dict[str, Any] | None = None, **options: Any
) -> Structure:
    (folder / "model.py").write_text(HEAD + textwrap.dedent(code))
    return extract(folder, "model.py", config or {}, **(OPTIONS | options))


def _refusal(folder: Path, code: str, config: dict[str, Any] | None = None, **options: Any) -> str:
    with pytest.raises(BadInput) as raised:
        _extract(folder, code, config, **options)
    message = str(raised.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def test_a_model_is_read_with_its_config_whatever_it_prints(tmp_path: Path) -> None:
    noisy = GOOD + 'print("{}", flush=True)\nimport sys; sys.stderr.write("warning\\n")\n'
    structure = _extract(
        tmp_path, noisy, {"width": 8}, batch_size=4, optimizer=Optimizer(name="sgd")
    )
    assert structure.parameters == 8 * 9 + 8 + 36 * 8 * 10 + 10
    assert structure.forward_flops_per_sample == 2 * 36 * 9 * 8 + 2 * 36 * 8 * 10
    assert (structure.batch_size, structure.optimizer, structure.method) == (
        4,
        "sgd",
        "fake tensors",
    )
    assert structure.features["conv_layers"] == 1
    assert structure.operations["aten.convolution_backward"] == 1


def test_modules_beside_the_source_and_its_own_batch_and_loss_are_used(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("from torch import nn\nhead = lambda: nn.Linear(64, 3)\n")
    code = """
    from parts import head
    def build_model(): return nn.Sequential(nn.Flatten(), head())
    def example_batch(size): return torch.rand(size, 1, 8, 8), torch.rand(size, 3)
    def loss(outputs, targets): return (outputs - targets).abs().mean()
    """
    structure = _extract(tmp_path, code, batch_spec=None)
    assert structure.parameters == 64 * 3 + 3
    assert "aten.abs" in structure.operations


@pytest.mark.parametrize(
    "loss", ["def loss(outputs, targets): return outputs.sum()\n", "loss = type('Odd', (), {})\n"]
)
def test_a_loss_without_the_parameter_refuses_label_smoothing(tmp_path: Path, loss: str) -> None:
    assert _refusal(tmp_path, GOOD + loss, label_smoothing=0.1) == (
        "train.label_smoothing: got 0.1; allowed: 0, as the loss of the model's source has no "
        "parameter label_smoothing"
    )


def test_label_smoothing_is_for_classes(tmp_path: Path) -> None:
    numbers = IMAGES.model_copy(update={"task": "tabular-regression", "classes": None})
    says = _refusal(tmp_path, GOOD, {"classes": 1}, label_smoothing=0.1, batch_spec=numbers)
    assert says.endswith("allowed: 0, as tabular-regression has no classes")
    assert _extract(tmp_path, GOOD, label_smoothing=0.1).parameters > 0
    own = """
def loss(outputs, targets, label_smoothing=0.0):
    return outputs.abs().mean() if label_smoothing else outputs.mean()
"""
    smoothed = _extract(tmp_path, GOOD + own, label_smoothing=0.1)
    assert "aten.abs" in smoothed.operations
    assert "aten.abs" not in _extract(tmp_path, GOOD + own).operations


def test_a_relative_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(HEAD + GOOD)
    monkeypatch.chdir(tmp_path)
    assert extract(Path(), "model.py", {}, batch_spec=IMAGES, limits=LIMITS).parameters > 0


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = 1", "defines no function build_model"),
        ("import no_such_module_at_all", "can't be imported: ModuleNotFoundError"),
        ("def build_model(: pass", "can't be imported: SyntaxError"),
        (
            "def build_model(): raise ValueError('no\\nway')",
            "build_model() raised ValueError: no way",
        ),
        ("def build_model(): return 3", "returned a int; allowed: a torch.nn.Module"),
        ("def build_model(): return nn.Flatten()", "no parameters"),
        (
            "def build_model(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))",
            "returns 5 outputs, but the data has 10 classes",
        ),
        (
            "def build_model(): return nn.Sequential(nn.Flatten(), nn.Linear(63, 10))",
            "its forward pass raised RuntimeError: mat1 and mat2",
        ),
        (
            GOOD + "def loss(outputs, targets): return outputs.sum(1)",
            "loss: returned (32,); allowed: a scalar",
        ),
        (GOOD + "def loss(outputs, targets): return 1 / 0", "loss: it raised ZeroDivisionError"),
        (
            GOOD + "def loss(outputs, targets): return torch.tensor(3)",
            "a tensor (int64) without a gradient",
        ),
        (
            GOOD + "def loss(outputs, targets): return outputs.detach().mean()",
            "(float32) without a gradient",
        ),
        (
            "def build_model(): return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))",
            "lazy modules without shapes",
        ),
        ("import os\ndef build_model(): os._exit(7)", "ended its process with exit code 7"),
        (
            "import os, signal\ndef build_model(): os.kill(os.getpid(), signal.SIGSEGV)",
            "crashed with signal 11",
        ),
    ],
)
def test_a_model_that_can_not_be_trained_gives_one_line(
    code: str, says: str, tmp_path: Path
) -> None:
    assert says in _refusal(tmp_path, code)


def test_outputs_that_do_not_match_the_targets_are_reported_with_both_shapes(
    tmp_path: Path,
) -> None:
    numbers = BatchSpec(
        inputs={"x": [2]},
        input_dtypes={"x": "float32"},
        target_dtype="float32",
        task="tabular-regression",
    )
    code = "def build_model(): return nn.Linear(2, 3)"
    says = _refusal(tmp_path, code, batch_spec=numbers, batch_size=4)
    assert "returns (4, 3), but the data's targets are (4,)" in says
    assert (
        _extract(
            tmp_path, "def build_model(): return nn.Linear(2, 1)", batch_spec=numbers, batch_size=4
        ).parameters
        == 3
    )


def test_a_wrong_argument_of_build_model_is_named(tmp_path: Path) -> None:
    message = _refusal(tmp_path, GOOD, {"depth": 3})
    assert "build_model(depth=3)" in message
    assert "unexpected keyword argument 'depth'" in message


def test_non_files_beside_the_source_are_ignored(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text(
        "import torch\n\n\ndef build_model():\n    return torch.nn.Linear(4, 2)\n\n\n"
        "def example_batch(n):\n    return torch.rand(n, 4), torch.zeros(n, dtype=torch.long)\n"
    )
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    os.mkfifo(tmp_path / "pipe.py")
    assert extract_model(str(source), doors.settings()).parameters == 10


def test_an_example_batch_must_have_the_requested_size(tmp_path: Path) -> None:
    source = GOOD + "\ndef example_batch(n): return torch.rand(8, 1, 8, 8), torch.zeros(8).long()\n"
    assert "example_batch(3) returns the same shapes as example_batch(4)" in _refusal(
        tmp_path, source, batch_spec=None, batch_size=4
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("torch.rand(n, 1, 8, 8)", "returned a tensor"),
        ("(torch.rand(n, 1, 8, 8),)", "returned 1 values"),
        ("None", "returned NoneType"),
    ],
)
def test_an_example_batch_is_a_pair(given: str, says: str, tmp_path: Path) -> None:
    message = _refusal(tmp_path, f"{GOOD}\ndef example_batch(n): return {given}\n", batch_spec=None)
    assert says in message
    assert message.endswith("allowed: a pair (inputs, targets)")


def test_without_data_a_source_needs_an_example_batch(tmp_path: Path) -> None:
    assert "defines no example_batch" in _refusal(tmp_path, GOOD, batch_spec=None)
    assert _extract(tmp_path, GOOD + EXAMPLE, batch_spec=None).parameters > 0


def test_an_endless_model_is_stopped_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.tasks.extract.call", call)  # with a server of its own
    code = "import time\ndef build_model():\n    time.sleep(3600)"
    before = set(psutil.Process().children(recursive=True))
    message = _refusal(tmp_path, code, limits=SandboxLimits(4, MEMORY), server=None)
    assert "tracing model.py did not end within 4 s; TRAINWRIGHT_EXTRACT_TIMEOUT_S" in message
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_model_that_hides_a_memory_error_is_reported_as_out_of_memory(tmp_path: Path) -> None:
    code = (
        "import sys, time\ndef build_model():\n"
        "    try: bytearray(2**60)\n"
        "    except MemoryError as error: print(repr(error), file=sys.stderr)\n"
        "    time.sleep(3600)"
    )
    message = _refusal(tmp_path, code, limits=SandboxLimits(4, MEMORY))
    assert "took too much memory and did not end within 4 s: MemoryError(); allowed: 8" in message
    assert message.endswith("TRAINWRIGHT_EXTRACT_MEMORY_GIB raises the limit")


def test_a_model_that_takes_too_much_memory_is_stopped(tmp_path: Path) -> None:
    code = "def build_model():\n    kept = bytearray(2**40)\n    return nn.Linear(1, 1)"
    message = _refusal(tmp_path, code, limits=SandboxLimits(60, MEMORY))
    assert "MemoryError" in message
    assert "allowed: 8 GiB" in message


def test_a_file_that_is_too_large_is_refused_with_the_limit(tmp_path: Path) -> None:
    code = "import tempfile; file = tempfile.TemporaryFile(); file.truncate(2**30)"
    message = _refusal(tmp_path, code)
    assert "File too large" in message
    assert "write at most 256 MiB in TMPDIR" in message


def test_an_error_caused_by_the_sandbox_says_what_a_model_may_do(tmp_path: Path) -> None:
    outside = tmp_path.parent / "vocabulary.txt"
    outside.write_text("words")
    message = _refusal(tmp_path, f"words = open({str(outside)!r}).read()")
    assert "No such file or directory" in message
    assert "may read only their own source and installed packages" in message


TOKENS = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, place):
        counts = torch.arange(12) < 1 + place % 7
        return torch.ones(12, dtype=torch.int64), torch.where(counts, 1, -100)


def dataset(uri, part):
    assert open(uri).read() == "rows"
    return Rows()


def build_model():
    return nn.Sequential(nn.Embedding(50, 8), nn.Dropout(0.5), nn.Linear(8, 5))


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
"""
TOKEN_EXAMPLE = """

def example_batch(size):
    rows = [Rows()[place] for place in range(size)]
    return tuple(torch.stack(one) for one in zip(*rows))
"""
TOKEN_ROWS = BatchSpec(
    inputs={"inputs": (12,)},
    input_dtypes={"inputs": "int64"},
    target_dtype="int64",
    target_shape=(12,),
)


@pytest.mark.parametrize("source", ["given rows", "the source's dataset", "example_batch"])
def test_a_loss_over_tokens_is_told_with_the_line_to_add(tmp_path: Path, source: str) -> None:
    given = [[1] * (1 + place % 7) + [-100] * (11 - place % 7) for place in range(10)]
    (tmp_path / "data").write_text("rows")
    targets, spec = {
        "given rows": ({"rows": given}, TOKEN_ROWS),
        "the source's dataset": ({"uri": str(tmp_path / "data")}, TOKEN_ROWS),
        "example_batch": ({}, None),
    }[source]
    code = TOKENS + (TOKEN_EXAMPLE if spec is None else "")
    found = _extract(tmp_path, code, batch_spec=spec, targets=targets).loss_notice
    line = "def loss_weight(targets): return (targets != -100).sum()"
    assert found.endswith(f"; add to the model's source: {line}")
    assert not _extract(tmp_path, f"{code}\n{line}\n", batch_spec=spec, targets=targets).loss_notice


def test_a_loss_is_told_on_the_jobs_data(tmp_path: Path) -> None:
    weighs = """
    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, torch.arange(1.0, 11.0))
    """
    file = tmp_path / "model.py"
    file.write_text(HEAD + GOOD + textwrap.dedent(weighs))
    data, heard = {"uri": "builtin:digits"}, list[dict[str, Any]]()
    job = Job.model_validate({"name": "own", "data": data, "model": {"source": str(file)}})
    assert job.model is not None
    with progress.listening(heard.append):
        found = extract_model(job.model, Settings(), spec=IMAGES, job=job).loss_notice
    assert "return a pair (sum, weight) from loss" in found
    assert [one["message"] for one in heard if one["event"] == "notice"] == [found]
