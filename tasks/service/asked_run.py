"""A run as the start of a question: a plan for its model, data and devices, with other limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainwright.estimator.structure import Structure
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.run_job import RunJob
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.listing import RUN_NAME
from trainwright.tasks.service.auth import Caller
from trainwright.tasks.service.records.run_records import Records
from trainwright.tasks.service.requests import PlanRequest, agree
from trainwright.tasks.service.served_files import NotServed, ServedFiles
from trainwright.tasks.spec.pool import Pool, load_pool


@dataclass(frozen=True)
class AskedRun:
    """What a plan needs of a run. Its estimate gives the predictions with which it was planned."""

    structure: Structure
    schema: DataSchema
    estimate: Estimate | None
    pool_file: str | None

    def pool_for(self, caller: Caller, served: ServedFiles) -> Pool:
        """The run's pool: its file if it is served, or if the caller may start runs with it.

        Else the served pool of its name. Raises NotServed if there is none.
        """
        if self.pool_file is None:
            return load_pool(None)
        try:
            return served.pool(self.pool_file)
        except NotServed:
            path = Path(self.pool_file)
            if caller.role == "run" and path.exists():
                return load_pool(self.pool_file)
            return served.pool(path.stem)


def asked_run(records: Records, request: PlanRequest) -> AskedRun:
    """The run that a request names.

    Raises NotFound; BadInput if the run has no structure or no data yet, or if the request has
    another optimizer or precision than the structure.
    """
    name = request.run or ""
    if RUN_NAME.fullmatch(name) is None:
        raise BadInput(f"run: got {name!r}; allowed: <job>/<run id>, as GET /runs lists them")
    run = records.found(*name.split("/"))
    structure, validation = run.find(Structure), run.find(Validation)
    if structure is None or validation is None or validation.data is None:
        raise BadInput(
            f"run: got {name}; its {'model' if validation else 'data'} is not known; "
            "allowed: a run that has done the step `extract`"
        )
    try:
        agree(structure, request.train)
    except ValueError as error:
        raise BadInput(f"train: allowed: {error}") from None
    return AskedRun(structure, validation.data, run.find(Estimate), run.read(RunJob).pool)
