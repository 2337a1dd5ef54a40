"""The command recommend: a model for a job's data, and its code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.tasks.cli.options import Debug, JobFile, Json, PoolFile, Set, print_json


def recommend(
    job: JobFile,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="write model.py there; an edited one is never replaced"
        ),
    ] = None,
    pool: PoolFile = None,
    changes: Set = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option("--calibration", metavar="FILE", help="from `calibrate --out`"),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Recommend models for a job's data, ranked, and write the code of the first one.

    A model that the job names is left out of account. No device is leased.
    """
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.cli.screens.recommendation_screen import show_recommendation
    from trainwright.tasks.estimate.calibrate import given
    from trainwright.tasks.recommend.source_code import require_replaceable, write_source
    from trainwright.tasks.recommend.step import recommend as recommended
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.spec.job import load_job

    chosen = load_job(job, pool, [*(changes or ()), "model=null"])
    if out is not None:
        require_replaceable(out)
    with console.working("reading the data, tracing and planning candidates"):
        measured = [given(file) for file in calibration or []]
        advice = recommended(chosen, Settings.from_environment(), measured)
    path = write_source(out, advice.text) if out is not None else None
    if as_json:
        print_json(advice.document(chosen.name, str(path) if path is not None else None))
        return
    show_recommendation(advice.recommendation)
    if path is not None:
        console.err.print(f"saved to {path}", markup=False)
