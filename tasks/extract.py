"""Step `extract`: a model's structure from its code, traced in a process of its own with limits, so that no model takes us down.

The process gets no secrets, no more than a stated time and memory, and ends with us. Of what it writes the last words are kept.
Signals to our process group do not reach it: whether it goes on is ours to say.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from trainwright.estimator.structure import PRECISIONS, Structure
from trainwright.estimator.trace.source import BatchSpec
from trainwright.infra.process import dying_with_parent, kill_all_with
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.errors import BadInput, from_document
from trainwright.tasks.runs.artefacts import DataSchema
from trainwright.tasks.runs.model import ModelSource
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.job import ModelSpec, Optimizer, check_batch_size
from trainwright.tasks.units import amount

_MARK = "TRAINWRIGHT_TRACE"
# While torch is imported, looking for garbage takes a tenth of the time, and finds nothing.
_TRACE = "import gc; gc.disable(); from trainwright.estimator.trace.trace import main; raise SystemExit(main())"
_SWEEPS = 5
_KEPT_BYTES = 4096
_JOIN_S = 5.0  # a process that hides from us may hold the pipe
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


def work(context: RunContext) -> Reference:
    """Trace the run's model, and store its structure."""
    run = context.run
    structure = run.find(Structure)
    if structure is None:
        job, model = run.job(), run.model()
        structure = extract(
            run.source_folder(),
            model.entry,
            dict(model.config),
            limits=context.settings.extract_limits(),
            batch_spec=batch_spec(run.data()),
            optimizer=job.train.optimizer,
            precision=job.train.precision,
        )
        run.write(structure)
    return {
        "artefact": Structure.FILE,
        "parameters": structure.parameters,
        "forward_flops_per_sample": structure.forward_flops_per_sample,
        "operations": sum(structure.operations.values()),
    }


def summary(reference: Reference) -> str:
    """For example: 9,098 parameters, 316 kFLOP a sample."""
    flops = amount(reference["forward_flops_per_sample"], "FLOP")
    return f"{reference['parameters']:,} parameters, {flops} a sample"


def batch_spec(schema: DataSchema) -> BatchSpec:
    """The estimator's view of the data."""
    return BatchSpec(
        inputs=schema.inputs,
        input_dtypes=schema.input_dtypes,
        target_dtype=schema.target_dtype,
        classes=len(schema.classes) if schema.classes else None,
        task=schema.task,
    )


def extract_model(
    model: str | dict[str, Any] | ModelSpec,
    settings: Settings,
    *,
    batch_size: int = 32,
    spec: BatchSpec | None = None,
    optimizer: Optimizer | None = None,
    precision: str = "fp32",
    accumulation: int = 1,
) -> Structure:
    """The structure of a model's source. Without `spec`, the source must define `example_batch`."""
    if isinstance(model, str):
        model = {"source": model}
    chosen = model if isinstance(model, ModelSpec) else validated(ModelSpec, model, "model")
    check_batch_size(batch_size)
    if precision not in PRECISIONS:
        raise BadInput(f"precision: got {precision!r}; allowed: {', '.join(PRECISIONS)}")
    if accumulation < 1:
        raise BadInput(f"accumulation: got {accumulation}; allowed: 1 or more")
    source = ModelSource.given(chosen)
    with tempfile.TemporaryDirectory(prefix="trainwright-source-") as name:
        return extract(
            source.unpack(Path(name)),
            source.entry,
            chosen.config,
            limits=settings.extract_limits(),
            batch_size=batch_size,
            batch_spec=spec,
            optimizer=optimizer or Optimizer(),
            precision=precision,
            accumulation=accumulation,
        )


def extract(
    source_folder: Path,
    entry: str,
    config: dict[str, Any],
    *,
    limits: tuple[float, int],
    batch_size: int = 32,
    batch_spec: BatchSpec | None = None,
    optimizer: Optimizer | None = None,
    precision: str = "fp32",
    accumulation: int = 1,
) -> Structure:
    """The structure of one training step. Raises BadInput where the model can't do one, or not within the limits.

    `limits`: seconds, and bytes of address space.
    """
    timeout_s, memory_limit_bytes = limits
    with tempfile.TemporaryDirectory(prefix="trainwright-extract-") as name:
        request, result = Path(name) / "request.json", Path(name) / "result.json"
        request.write_text(
            json.dumps(
                {
                    "folder": str(source_folder.absolute()),
                    "entry": entry,
                    "config": config,
                    "batch_size": batch_size,
                    "spec": batch_spec.model_dump(mode="json") if batch_spec else None,
                    "optimizer": (optimizer or Optimizer()).model_dump(),
                    "precision": precision,
                    "accumulation": accumulation,
                    "memory_limit_bytes": memory_limit_bytes,
                }
            )
        )
        command = [sys.executable, "-c", _TRACE, str(request), str(result)]
        environment = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        mark = secrets.token_hex(8)
        environment |= {_MARK: mark, "TMPDIR": name}  # what it leaves there goes with us
        process = subprocess.Popen(
            dying_with_parent(command),
            env=environment,
            cwd=name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        left = 0
        try:
            words = _LastWords(process.stdout)
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
            for _ in range(
                _SWEEPS
            ):  # what the model's code started and left behind, and may start meanwhile
                if not (found := kill_all_with(_MARK, mark)):
                    break
                left = max(left, found)
        last = words.line()
        if code is None:
            raise BadInput(_late(entry, timeout_s, left, last, memory_limit_bytes))
        if code != 0 or not result.exists():
            raise BadInput(
                f"model: tracing {entry} {_how_it_ended(code, last, memory_limit_bytes)}"
            )
        answer = json.loads(result.read_text())
    if "error" in answer:
        error = from_document(answer["error"])
        if of_memory(str(error)):
            raise BadInput(f"{error}; {_memory_allowed(memory_limit_bytes)}")
        raise error
    return Structure.model_validate(answer)


class _LastWords(threading.Thread):
    """Reads what a process writes to its end, and keeps the last of it."""

    def __init__(self, written: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._written, self._kept = written, b""
        self.start()

    def run(self) -> None:
        with self._written:
            while part := os.read(self._written.fileno(), 1 << 16):
                self._kept = (self._kept + part)[-_KEPT_BYTES:]

    def line(self) -> str:
        """The last line, once all who could write have ended."""
        self.join(timeout=_JOIN_S)
        lines = self._kept.decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""


def _how_it_ended(code: int, last: str, memory_limit_bytes: int) -> str:
    if of_memory(last):
        return f"took too much memory: {last}; {_memory_allowed(memory_limit_bytes)}"
    if code == -signal.SIGKILL:
        return f"was killed, perhaps by the system for want of memory; {_memory_allowed(memory_limit_bytes)}"
    if code < 0:
        return f"crashed the process (signal {-code}) {last}".rstrip()
    if code == 0:
        return f"ended the process without an answer {last}".rstrip()
    return f"ended the process with {code}: {last}" if last else f"ended the process with {code}"


def _late(entry: str, timeout_s: float, left: int, last: str, memory_limit_bytes: int) -> str:
    """`left` is how many processes that the model's code had started still ran."""
    if of_memory(last):
        allowed = _memory_allowed(memory_limit_bytes)
        return f"model: tracing {entry} took too much memory, and did not end within {timeout_s:g} s: {last}; {allowed}"
    cause = (
        f"it had started {left} process(es) that still ran: does it wait for them?"
        if left
        else "does it end?"
    )
    return f"model: {entry} was not traced within {timeout_s:g} s; {cause} TRAINWRIGHT_EXTRACT_TIMEOUT_S allows more"


def of_memory(words: str) -> bool:
    """Whether a process's last words are of memory that it did not get."""
    return any(
        one in words for one in ("MemoryError", "bad_alloc", "allocate memory", "memory allocation")
    )


def _memory_allowed(limit_bytes: int) -> str:
    return f"allowed: {limit_bytes / 2**30:g} GiB of address space (TRAINWRIGHT_EXTRACT_MEMORY_GIB)"
