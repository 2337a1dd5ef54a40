"""The command `export`: a finished run's model in a form that needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.tasks.cli.options import Debug, Json, Store, print_model


def export(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="a finished run's id or URI")],
    kind: Annotated[
        str, typer.Option("--to", metavar="KIND", help="the form: onnx, onnx-int8 or rtl")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="a new or empty folder for a copy"),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            help="how much worse the metric may be, below 1; default: the job's, else by kind",
        ),
    ] = None,
    fine_tune: Annotated[
        bool | None,
        typer.Option(
            "--fine-tune/--no-fine-tune",
            help="onnx-int8: train again for a short time if the metric falls by more than the "
            "tolerance; default: as the job says",
        ),
    ] = None,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Export a run's stored model, and compare it with the trained one on the validation rows.

    The files are in the run's folder, below export/KIND.
    """
    from rich.markup import escape

    from trainwright.tasks import progress
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.cli.screens.export_table import export_facts, progress_line
    from trainwright.tasks.export.export_run import checked_kind, export_run
    from trainwright.tasks.runs.run import resolve
    from trainwright.tasks.settings import Settings

    checked_kind(kind)
    chosen = resolve(run_id, Settings.from_environment(), store)
    with console.err.status("exporting") as status:

        def tell(event: progress.Event) -> None:
            if event["event"] != "export":
                return
            if (line := progress_line(event)) is not None:
                console.err.print(line, markup=False, soft_wrap=True)
            status.update(f"{event['kind']}: {escape(event['doing'])}")

        with progress.listening(tell):
            report = export_run(chosen, kind, out=out, tolerance=tolerance, fine_tune=fine_tune)
    if as_json:
        print_model(report)
        return
    console.facts("export", export_facts(report.model_dump(), str(out) if out else None))
