"""A model's source: defines `build_model`, and optionally the other functions of ModelDefinition.

`snapshot` reads the whole source, `load` imports it from a folder. Loading runs the user's code and
needs torch, so do it in a separate process.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from trainwright.estimator.errors import BadInput
from trainwright.estimator.named_file import kind_of_file
from trainwright.estimator.near_names import meant_file

if TYPE_CHECKING:
    import torch

ADAPT_ROWS = 16_384
"""Training rows that `adapt` of a model's source gets, at most."""
_MAX_BYTES = 20_000_000
_TREE = Path(__file__).parents[2]


class BatchSpec(BaseModel):
    """The shape of one sample, to make a batch for a model without `example_batch`."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    inputs: dict[str, tuple[int, ...]]
    input_dtypes: dict[str, str]
    nesting: Any = None
    """see `nested`"""
    target_dtype: str
    target_shape: tuple[int, ...] = ()
    classes: int | None = None
    task: str = "custom"


@dataclass(frozen=True)
class ModelDefinition:
    """The functions of a model's source.

    loss(outputs, targets)
        None if the job's task determines the loss. Training passes the job's label smoothing to a
        parameter `label_smoothing`; validation passes none, so its default is to be 0. It returns
        the mean over the batch, or a pair (sum, weight).
    loss_weight(targets)
        The weight of a batch in the joint loss, if `loss` returns a mean that is not over samples:
        the number that it divides by, such as that of tokens which count.
    adapt(model, inputs, targets, names)
        Sets buffers and initial parameters from up to 16,384 training rows, without gradients.
        `names`: for each category column its values in the order of their codes, which begin at 1,
        and for the target the names of the classes.
    predict(model, rows)
        Raw rows by column to predictions by name: `prediction`, and `probability` for classes.
    dataset(uri, part, **config)
        The training or validation part of the data at `uri`, as a torch dataset; `collate(samples)`
        makes a batch.
    """

    build_model: Callable[..., Any]
    example_batch: Callable[[int], Any] | None
    loss: Callable[[Any, Any], Any] | None
    adapt: Callable[[Any, Any, Any, dict[str, list[str]]], None] | None = None
    predict: Callable[[Any, dict[str, list[Any]]], dict[str, list[Any]]] | None = None
    dataset: Callable[..., Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    loss_weight: Callable[[Any], Any] | None = None


def snapshot(source: str) -> tuple[str, dict[str, bytes]]:
    """The entry point and the files (relative path -> content) of a model's source.

    For a file, the modules and packages of its folder are included; for `package.module`, the whole
    top-level package. Raises BadInput if there is no such source.
    """
    if source.endswith(".py") or "/" in source:
        path = Path(source)
        if path.exists() and not path.is_file():
            kind = kind_of_file(path.stat().st_mode)
            raise BadInput(f"model.source: got {source}, which is {kind}; allowed: a regular file")
        if not path.is_file():
            raise BadInput(f"model.source: got {source}; there is no such file{meant_file(source)}")
        if path.suffix != ".py":
            raise BadInput(f"model.source: got {source}; allowed: a Python file{_job_hint(source)}")
        return path.name, _modules(path.parent)
    top = source.split(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise BadInput(
            f"model.source: got {source!r}; allowed: a file path/to/model.py, or a Python module "
            f"that can be imported{_job_hint(source)}"
        )
    origin = Path(spec.origin or "")
    if not origin.is_file() or origin.suffix != ".py":
        raise BadInput(
            f"model.source: got {source!r}; {top} has no Python file that can be copied; "
            "allowed: a file path/to/model.py, or a module in a Python file"
        )
    if spec.submodule_search_locations is None:
        return source, {origin.name: origin.read_bytes()}
    return source, {f"{top}/{name}": data for name, data in _modules(origin.parent).items()}


def _job_hint(source: str) -> str:
    """For a file that may be a job's: which command takes it."""
    if Path(source).suffix not in (".yaml", ".yml", ".json"):
        return ""
    return f"; `trainwright plan {source}` takes a job file"


def _modules(folder: Path) -> dict[str, bytes]:
    found = sorted(folder.glob("*.py"))
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        found += sorted(package.rglob("*.py"))
    # Leave out folders, pipes and broken links with names like modules.
    files = {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}
    if sum(path.stat().st_size for path in files.values()) > _MAX_BYTES:
        raise BadInput(
            f"model.source: the modules beside it in {folder} are larger than {_MAX_BYTES} bytes; "
            "give it a folder of its own"
        )
    return {name: path.read_bytes() for name, path in files.items()}


def digest(files: dict[str, bytes]) -> str:
    """One SHA-256 over the names and contents of a snapshot."""
    whole = hashlib.sha256()
    for name, data in sorted(files.items()):
        whole.update(f"{name}\0{len(data)}\0".encode() + data)
    return whole.hexdigest()


def load(folder: Path, entry: str) -> ModelDefinition:
    """Import the source in a folder. Raises BadInput if that fails, or without `build_model`."""
    sys.path.insert(0, str(folder))
    name = entry.removesuffix(".py")
    try:
        if entry.endswith(".py"):
            spec = importlib.util.spec_from_file_location(name, folder / entry)
            if spec is None or spec.loader is None:
                raise BadInput(f"model.source: {entry} is not a Python module")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(name)
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        says = f"model.source: {entry} can't be imported: {described(error)}"
        if isinstance(error, ModuleNotFoundError):
            says += "; if that is a package, install it here, in trainwright's environment"
        raise BadInput(says) from error
    build = getattr(module, "build_model", None)
    if not callable(build):
        raise BadInput(
            f"model.source: {entry} defines no function build_model(**config) -> torch.nn.Module"
        )
    optional = [one.name for one in fields(ModelDefinition) if one.name != "build_model"]
    return ModelDefinition(build, **{name: getattr(module, name, None) for name in optional})


def build(definition: ModelDefinition, config: dict[str, Any]) -> torch.nn.Module:
    """The model. Raises BadInput if `build_model` fails or does not return a module."""
    import torch

    try:
        model = definition.build_model(**config)
    except (Exception, SystemExit) as error:
        raise BadInput(
            f"model: build_model({_arguments(config)}) raised {described(error)}"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise BadInput(
            f"model: build_model({_arguments(config)}) returned a {type(model).__name__}; "
            "allowed: a torch.nn.Module"
        )
    if any(torch.nn.parameter.is_lazy(one) for one in (*model.parameters(), *model.buffers())):
        raise BadInput(
            f"model: build_model({_arguments(config)}) returned lazy modules without shapes; run a "
            "batch through them there"
        )
    return _uncompiled(model)


def _uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module without the wrappers of `torch.compile`, so that names are those of its source.

    Ranks run modules as they are: batches of several sizes, layouts and recomputation would compile
    them again and again.
    """
    while type(module).__name__ == "OptimizedModule":
        module = module._modules["_orig_mod"]  # type: ignore[assignment]
    module._compiled_call_impl = None  # of `module.compile()`
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _uncompiled(child)
    return module


def nested(inputs: Mapping[str, Any], nesting: Any = None) -> Any:
    """Inputs by name as a model gets them.

    `nesting` has the names in nested lists, which become tuples, and dicts. Without it, a single
    input is given alone and several as a dict.
    """
    if isinstance(nesting, list | tuple):
        return tuple(nested(inputs, part) for part in nesting)
    if isinstance(nesting, dict):
        return {key: nested(inputs, part) for key, part in nesting.items()}
    if nesting is not None:
        return inputs[nesting]
    return next(iter(inputs.values())) if len(inputs) == 1 else dict(inputs)


def adapt(
    definition: ModelDefinition,
    model: torch.nn.Module,
    inputs: Any,
    targets: torch.Tensor,
    names: dict[str, list[str]],
) -> None:
    """Call the source's `adapt`, if it has one, without gradients. Raises BadInput if it fails."""
    import torch

    if definition.adapt is None:
        return
    try:
        with torch.no_grad():
            definition.adapt(model, inputs, targets, names)
    except (Exception, SystemExit) as error:
        raise BadInput(f"model: adapt raised {described(error)}") from error


def described(error: BaseException) -> str:
    """An exception's type and message, and the line of the user's code that raised it, in one line.

    Without torch's stack of C++ code.
    """
    says = " ".join(str(error).split("Exception raised from")[0].split())[:300]
    line = f"{type(error).__name__}: {says}" if says else type(error).__name__
    frames = [
        one for one in traceback.extract_tb(error.__traceback__) if _of_the_user(one.filename)
    ]
    if not frames:
        return line
    # Code can be compiled under any name.
    file = " ".join(Path(frames[-1].filename).name.split())[:100]
    return f"{line} ({file}, line {frames[-1].lineno})"


def _of_the_user(file: str) -> bool:
    """Whether a file is neither Python's, nor of an installed package, nor of trainwright."""
    installed = (sysconfig.get_path(one) for one in ("stdlib", "purelib", "platlib"))
    ours = (str(_TREE / one) for one in ("estimator", "tasks", "infra"))
    return not file.startswith(("<", *installed, *ours))


def _arguments(config: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in config.items())
