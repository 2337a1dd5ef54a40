"""Opens the model of a finished run for an export: verified, unpacked, with its rows."""

from __future__ import annotations

from pathlib import Path

from trainwright.tasks.errors import BadInput
from trainwright.tasks.export.exportable import Exportable
from trainwright.tasks.export.exported_rows import write_rows
from trainwright.tasks.promote import metric_of
from trainwright.tasks.runs.artefacts.data_schema import Vocabulary
from trainwright.tasks.runs.artefacts.run_status import Manifest
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.metric_names import metrics_of
from trainwright.tasks.store import model_weights, unpack_model


def open_model(run: Run, folder: Path) -> Exportable:
    """The model and the rows of a finished run, in a folder.

    Raises BadInput if the run is not finished or its data is not there any more, CorruptArtefact
    if a file of the run differs from what was sealed.
    """
    manifest = run.find(Manifest)
    if manifest is None:
        raise BadInput(
            f"run: {run.uri} is not finished: it has no {Manifest.FILE}; `trainwright run JOB` "
            "continues it and stores its model; allowed: a run whose step `store` is done"
        )
    signature = unpack_model(run, manifest.files, folder / "source")
    weights = folder / "model.safetensors"
    weights.write_bytes(model_weights(run))
    validation = run.find(Validation)
    result = run.find(Result)
    assert validation is not None  # a model is trained on validated data
    assert validation.data is not None
    assert result is not None  # and a sealed run has a result
    schema = validation.data
    vocabulary = run.find(Vocabulary)
    metric = _metric(run, schema.task, result)
    mase, mae = result.metrics.get("mase"), result.metrics.get("mae")
    return Exportable(
        folder=folder,
        source=folder / "source",
        entry=signature["entry"],
        config=signature["config"],
        precision=signature["precision"],
        weights=weights,
        schema=schema,
        vocabularies=vocabulary.names if vocabulary is not None else {},
        run_uri=run.uri,
        data_sha256=schema.sha256,
        metric=metric,
        trained=result.metrics[metric],
        naive=mae / mase if mase and mae else None,
        keeps_missing=run.job().data.missing == "keep",
        rows=write_rows(run, schema, folder / "rows"),
    )


def _metric(run: Run, task: str, result: Result) -> str:
    """The metric that the job names, else the task's first one that the result has, not a loss."""
    named = metric_of(run.job())
    known = [one for one in metrics_of(task) if one != "loss" and one in result.metrics]
    if named is not None and named in result.metrics:
        return named
    return known[0] if known else "loss"
