"""Step `extract`: derives a model's structure by running its code in the sandbox."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.estimator.near_names import meant
from trainwright.estimator.structure import PRECISIONS, Structure
from trainwright.estimator.trace.source import BatchSpec
from trainwright.infra.sandbox import SandboxLimits, Stop
from trainwright.infra.sandbox.client import SandboxServer, call, scrubbed_environment
from trainwright.tasks import progress
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.generated_columns import require_generated_columns
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.model import ModelSource
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.job import Job, ModelSpec
from trainwright.tasks.spec.train_spec import Optimizer, check_batch_size
from trainwright.tasks.trace_request import TRACER, trace_request, traced_structure
from trainwright.tasks.units import amount

CHECKED_ROWS, CHECKED_NUMBERS = 64, 400_000
"""Real targets on which a source's loss is checked: rows, and numbers in them"""
_log = logging.getLogger(__name__)
_RAISED_BY: dict[Stop, str] = {
    "time": "TRAINWRIGHT_EXTRACT_TIMEOUT_S",
    "memory": "TRAINWRIGHT_EXTRACT_MEMORY_GIB",
}


def work(context: RunContext) -> Reference:
    """Trace the run's model, and store its structure."""
    run = context.run
    structure = run.find(Structure)
    if structure is None:
        job, model = run.job(), run.model()
        entry = model.files.get(model.entry, b"").decode(errors="replace")
        require_generated_columns(entry, model.entry, run.data())
        structure = extract(
            run.source_folder(),
            model.entry,
            dict(model.config),
            limits=context.settings.extract_limits(),
            batch_spec=batch_spec(run.data()),
            optimizer=job.train.optimizer,
            precision=job.train.precision,
            label_smoothing=job.train.label_smoothing,
            targets=targets_of(job, model, context.settings),
        )
        run.write(structure)
    say_loss(structure)
    return {
        "artefact": Structure.FILE,
        "parameters": structure.parameters,
        "forward_flops_per_sample": structure.forward_flops_per_sample,
        "operations": sum(structure.operations.values()),
    }


def summary(reference: Reference) -> str:
    """One line, as in `9,098 parameters, 316 kFLOP a sample`."""
    flops = amount(reference["forward_flops_per_sample"], "FLOP")
    return f"{reference['parameters']:,} parameters, {flops} a sample"


def say_loss(structure: Structure) -> None:
    """A notice if the source's loss is not the mean that ranks join."""
    if structure.loss_notice:
        progress.emit("notice", message=structure.loss_notice)


def targets_of(job: Job, model: ModelSource, settings: Settings) -> dict[str, Any] | None:
    """Where the tracer finds real rows of targets, to check a loss of the source's own.

    None if the source has none, or for forecasts.
    """
    entry = model.files.get(model.entry, b"")
    if model.origin != "given" or not re.search(rb"\bloss\b", entry):
        return None
    from trainwright.tasks.data.dataset import first_targets
    from trainwright.tasks.data.sources import localized

    data = localized(job.data, settings)
    if data.reader == "model":
        return {"uri": data.uri}
    rows = first_targets(data, CHECKED_ROWS, CHECKED_NUMBERS)
    return None if rows is None else {"rows": rows.tolist()}


def batch_spec(schema: DataSchema) -> BatchSpec:
    """The estimator's view of the data."""
    return BatchSpec(
        inputs=schema.inputs,
        input_dtypes=schema.input_dtypes,
        nesting=schema.nesting,
        target_dtype=schema.target_dtype,
        target_shape=schema.target_shape,
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
    label_smoothing: float = 0.0,
    job: Job | None = None,
) -> Structure:
    """The structure of a model's source. Without `spec`, the source must define `example_batch`.

    A loss of its own is checked on targets of the job's data, else of `example_batch`.
    """
    if isinstance(model, str):
        model = {"source": model}
    chosen = model if isinstance(model, ModelSpec) else validated(ModelSpec, model, "model")
    check_batch_size(batch_size)
    if precision not in PRECISIONS:
        near = meant(precision, PRECISIONS)
        raise BadInput(f"precision: got {precision!r}; allowed: {', '.join(PRECISIONS)}{near}")
    if accumulation < 1:
        raise BadInput(f"accumulation: got {accumulation}; allowed: 1 or more")
    source = ModelSource.given(chosen)
    with tempfile.TemporaryDirectory(prefix="trainwright-source-") as name:
        structure = extract(
            source.unpack(Path(name)),
            source.entry,
            chosen.config,
            limits=settings.extract_limits(),
            batch_size=batch_size,
            batch_spec=spec,
            optimizer=optimizer or Optimizer(),
            precision=precision,
            accumulation=accumulation,
            label_smoothing=label_smoothing,
            targets={} if job is None else targets_of(job, source, settings),
        )
    say_loss(structure)
    return structure


def tracer() -> SandboxServer:
    """A sandbox that traces several models, for `extract`. Raises TrainwrightError."""
    try:
        server = SandboxServer(TRACER, environment=scrubbed_environment())
        server.wait_ready()
    except OSError as error:
        raise TrainwrightError(f"model: none can be traced: {error}") from error
    return server


def extract(
    source_folder: Path,
    entry: str,
    config: dict[str, Any],
    *,
    limits: SandboxLimits,
    batch_size: int = 32,
    batch_spec: BatchSpec | None = None,
    optimizer: Optimizer | None = None,
    precision: str = "fp32",
    accumulation: int = 1,
    label_smoothing: float = 0.0,
    server: SandboxServer | None = None,
    targets: Mapping[str, Any] | None = None,
) -> Structure:
    """The structure of one training step of a model. `server`: an open `tracer`.

    `targets`: where real rows of them are (`targets_of`), to check a loss of the source's own.

    Raises BadInput if a step fails or exceeds the limits.
    """
    request = trace_request(
        source_folder,
        entry,
        config,
        batch_size=batch_size,
        batch_spec=batch_spec,
        optimizer=optimizer or Optimizer(),
        precision=precision,
        accumulation=accumulation,
        label_smoothing=label_smoothing,
        targets=targets,
    )
    data = [Path(targets["uri"])] if targets is not None and "uri" in targets else []
    try:
        if server is None:
            outcome = call(TRACER, request, limits, readable=[source_folder, *data])
        else:
            outcome = server.ask(request, limits, readable=[source_folder, *data])
    except OSError as error:
        raise TrainwrightError(f"model: {entry} can't be traced: {error}") from error
    if outcome.protection != "own namespaces":
        _log.warning(
            "%s ran with weaker protection (%s): the kernel allows this user no namespaces",
            entry,
            outcome.protection,
        )
    return traced_structure(outcome, entry, limits, _RAISED_BY)
