"""A finished run of a real short training, without Airflow, gate and planner."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Any

import doors
from training_case import NO_SPARE, planned

from trainwright.tasks.data import dataset
from trainwright.tasks.runs.artefacts.data_schema import Vocabulary
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.run_status import Manifest, Status
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.model import ModelSource
from trainwright.tasks.runs.run import Run
from trainwright.tasks.store import save_model, seal
from trainwright.tasks.train import TrainRequest, train

RUN = "runs/case/20260101T000000Z-abcdef"
HEAD = "import torch\nfrom torch import nn\n\n"


def stored_run(folder: Path, code: str, data: dict[str, Any], **spec: Any) -> Run:
    """Train the model in `code` on two emulated devices, store it, and seal the run."""
    source = folder / "net.py"
    source.write_text(HEAD + textwrap.dedent(code))
    run = doors.run_at(f"file://{folder}/store/{RUN}")
    job = RunJob.model_validate(
        {
            "name": "case",
            "data": data,
            "model": {"source": str(source)},
            "train": {"epochs": 3, "backend": "torch", "adaptive_split": False, **NO_SPARE, **spec},
        }
    )
    run.write(job)
    run.write(Status(state="success", holder="me", started_at="2026", updated_at="2026"))
    assert job.model is not None
    run.write_model(ModelSource.given(job.model))
    found = dataset.load(job.data, job.train.seed)
    run.write(
        Validation(
            success=True,
            suite_source="inferred",
            suite=[],
            expectations=[],
            data=found.schema,
            checked_rows=found.schema.rows,
            great_expectations={},
        )
    )
    if names := found.names():
        run.write(Vocabulary(names=names))
    plan = planned([{"type": "emulated", "speed": 1e6}] * 2, [40, 20])
    run.write(plan)
    request = TrainRequest(
        job=job,
        plan=plan,
        learning_rate=0.01,
        schema=found.schema,
        source_folder=str(run.source_folder()),
        entry="net.py",
        run_uri=run.uri,
        work_folder=str(folder / "work"),
        settings=doors.settings(),
    )
    run.write(train(request))
    seal(run, save_model(run))
    return run


def with_source(run: Run, folder: Path, code: str) -> Run:
    """A copy of a run without its exports, sealed with another source of its model."""
    exports = shutil.ignore_patterns("export")
    shutil.copytree(run.uri.removeprefix("file://"), folder / "store" / RUN, ignore=exports)
    copy = doors.run_at(f"file://{folder}/store/{RUN}")
    copy.objects.put("model/source/net.py", (HEAD + textwrap.dedent(code)).encode())
    copy.objects.delete(Manifest.FILE)
    seal(copy)
    return copy
